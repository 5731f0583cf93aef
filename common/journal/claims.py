"""Which records of which incarnation are part of the run, read from the claims.

Each start of the learner claims the next incarnation with a file, `claims/{incarnation:06d}.json`. The
claim names the parent incarnation and how many bytes of the parent's journal count. The run's records
are found by following these claims, never by the highest step. Example: incarnation 2 claims 900 bytes
of incarnation 1. Records that incarnation 1 still appends after byte 900 are not part of the run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.files.reading import parse_json, reading
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.segments import REMEDY, explain_gap, left_out, read_journal, valid_length
from penstock.common.wire.codec import fields_as


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two records: the incarnation and the offset in its journal, in bytes."""

    incarnation: int
    offset: int

    def __str__(self) -> str:
        """Return "the journal of incarnation 2, record that ends at byte 900", a text for errors."""
        return f"the journal of incarnation {self.incarnation}, record that ends at byte {self.offset}"


@dataclass(frozen=True, slots=True)
class Claim:
    """The start of an incarnation: it continues after `parent_length` bytes of its parent's journal.

    `parent` is 0 for the first incarnation of a run. `holder` names the process, for people.
    """

    incarnation: int
    parent: int
    parent_length: int
    holder: str


def read_claims(run_folder: RunFolder) -> dict[int, Claim]:
    """Return all claims of the run by incarnation, in no order; {} if there are none.

    Raise ConfigError if a claim's file is damaged, has another incarnation than its name says, or
    continues no earlier incarnation.
    """
    claims = {}
    for path in run_folder.claims.glob("*.json"):
        with reading(path, f"Expected the place from which its learner continued. {REMEDY}"):
            claim = Claim(**fields_as(Claim, parse_json(path.read_bytes()), "claim"))
            in_order = int(path.stem) == claim.incarnation > claim.parent >= 0
            if not (in_order and claim.parent_length >= 0):
                raise ValueError(
                    f"found incarnation {claim.incarnation} after byte {claim.parent_length} of "
                    f"incarnation {claim.parent}, expected {path.stem} as in the file's name, after a "
                    "byte of an earlier one: put the claim's file back from a copy"
                )
        claims[claim.incarnation] = claim
    return claims


def ancestors(run_folder: RunFolder, claims: dict[int, Claim], newest: int) -> list[Claim]:
    """Return the claims of the incarnation `newest`, its parent and so on to the first, newest first.

    With `newest` 0 the list is empty. Raise ConfigError if a claim is missing from `claims`.
    """
    found = []
    while newest:
        if newest not in claims:
            gap = f"{run_folder.claim(newest)} is missing, and later claims continue from it"
            raise ConfigError(f"{gap}. {REMEDY}")
        found.append(claims[newest])
        newest = found[-1].parent
    return found


def next_claim(
    run_folder: RunFolder, incarnation: int, holder: str, checkpointed: Position | None = None
) -> Claim:
    """Return a claim: `incarnation` continues the newest claim's journal, if any. Write no file.

    The journal counts up to its last whole record; a torn or damaged last one is logged and left out.
    `holder` names the process. Raise ConfigError if a claim or the journal's beginning is missing, a
    claim is damaged, or whole records follow damage after `checkpointed`, the newest checkpoint.
    """
    claims = read_claims(run_folder)
    parent = max(claims, default=0)
    ancestors(run_folder, claims, parent)
    start = checkpointed.offset if checkpointed and checkpointed.incarnation == parent else 0
    length = valid_length(run_folder, parent, start)
    rest = left_out(run_folder, parent, length)
    if rest is not None and not rest.torn:
        cut = f"truncate -s {rest.offset} {rest.path}, delete later files of its incarnation"
        gap = f"damaged journal: {explain_gap(run_folder, parent, length)}"
        raise ConfigError(f"{gap}. To drop the {rest.length} bytes after it: {cut}, `queues discard`")
    return Claim(incarnation, parent, length, holder)


def read_chain(
    run_folder: RunFolder, newest: Claim, start: Position | None = None
) -> Iterator[tuple[Position, dict[str, Any]]]:
    """Yield the run's records before the claim `newest`, oldest first, each with the position after it.

    Records before `start` are left out; None: all are yielded. The journal of `newest`'s own incarnation
    is not read. Raise ConfigError if a claim is missing or damaged. Raise ConfigError also at a missing
    or damaged record that a claim counts as part of the run, after the records before it are yielded.
    """
    start = start or Position(1, 0)
    parents = ancestors(run_folder, read_claims(run_folder), newest.parent)
    chain = [claim for claim in (newest, *parents) if claim.parent >= start.incarnation]
    for incarnation, length in ((claim.parent, claim.parent_length) for claim in reversed(chain)):
        reached = first = start.offset if incarnation == start.incarnation else 0
        for reached, record in read_journal(run_folder, incarnation, first, length):
            yield Position(incarnation, reached), record
        if reached < length:
            raise ConfigError(explain_gap(run_folder, incarnation, reached, length))


def lengths_on_chain(run_folder: RunFolder, newest: Claim) -> dict[int, int]:
    """Return by incarnation how many bytes of its journal count: as many as its successor's claim names.

    All claims of the folder are read. `newest` replaces a claim with the same parent; of two others with
    the same parent either may count. The first claim's parent 0 has a length too. The incarnation of
    `newest` is left out. Raise ConfigError if a claim's file is damaged.
    """
    lengths = {claim.parent: claim.parent_length for claim in read_claims(run_folder).values()}
    return lengths | {newest.parent: newest.parent_length}
