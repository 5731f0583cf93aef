"""What became of a run's tickets, by its journal alone: no queue server is asked."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.files.reading import reading
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal import segments
from penstock.common.journal.claims import read_chain, read_claims

_DEAD_KEPT = 1000


@dataclass(slots=True)
class JournalAudit:
    """The tickets issued and ended by a journal, and its steps. `ended` has by end state a count.

    `dead` has the newest 1,000 tickets that failed too often, each with the reason, the newest last.
    """

    issued_train: int = 0
    questions: dict[str, int] = field(default_factory=dict)  # held-out ones, by evaluated version
    ended: Counter[str] = field(default_factory=Counter)
    ended_again: int = 0  # tickets with a second end
    trained_again: int = 0  # of these, tickets that were trained twice
    steps: int = 0
    starts: int = 0
    gaps: list[int] = field(default_factory=list)  # steps that do not follow the one before
    complete: bool = False  # the run has ended by itself
    cut: int = 0  # bytes of a half-written last record
    dead: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_DEAD_KEPT))

    @property
    def issued(self) -> int:
        """The tickets that were issued, to train on and to evaluate."""
        return self.issued_train + sum(self.questions.values())

    @property
    def open(self) -> int:
        """The tickets without an end; below 0 if more ended than were issued."""
        return self.issued - (self.ended.total() - self.ended_again)

    def faults(self) -> list[str]:
        """Return a sentence for each thing that a sound journal does not have; [] if it is sound."""
        found = []
        if self.trained_again:
            found.append(f"{self.trained_again} groups were trained twice")
        if self.ended_again:
            found.append(f"{self.ended_again} tickets ended twice")
        if self.gaps:
            found.append(f"steps are not 1, 2, 3 and so on: step {self.gaps[0]} is out of order")
        if self.open < 0:
            found.append(f"{-self.open} tickets ended that were never issued")
        if self.complete and self.open > 0:
            found.append(f"the run has ended, but {self.open} tickets have no end")
        return found


def audit_journal(folder: RunFolder) -> JournalAudit:
    """Return the audit of the run in `folder` by its journal, which is read record by record.

    About 150 bytes of memory are used per ticket. A half-written last record is left out. Raise
    ConfigError if there is no journal, or if records are missing or damaged.
    """
    if not (claims := read_claims(folder)):
        raise ConfigError(
            f"{folder.path} has no journal: expected the folders journal/ and claims/ of its learner"
        )
    audit, first_ends, newest, end = JournalAudit(), dict[str, str](), max(claims), 0
    with reading(folder.journal, segments.REMEDY):
        for _, record in read_chain(folder, claims[newest]):
            _count(audit, first_ends, record)
        for end, record in segments.read_journal(folder, newest):  # noqa: B007
            _count(audit, first_ends, record)
    rest = segments.left_out(folder, newest, end)
    if not audit.starts or (rest is not None and not rest.torn):
        raise ConfigError(segments.explain_gap(folder, newest, end))
    audit.cut = rest.length if rest else 0
    return audit


def _count(audit: JournalAudit, first_ends: dict[str, str], record: dict[str, Any]) -> None:
    """Add `record` to `audit`, and each ticket's first end state to `first_ends`."""
    audit.issued_train = max(audit.issued_train, int(record["ledger"]["next_number"]))
    if record["kind"] == "header":
        audit.starts += 1
    elif record["kind"] == "batch":
        audit.steps += 1
        audit.gaps += [record["step"]] * (record["step"] != audit.steps)
    elif record["kind"] == "evaluation":
        audit.questions[record["version"]] = len(record.get("asked", range(record["questions"])))
    elif record["kind"] == "end":
        audit.complete = True
    for ticket, (state, *reason) in record["ends"].items():
        audit.ended[state] += 1
        if state == "dead":
            audit.dead.append((ticket, str(reason[0]) if reason else ""))
        if ticket in first_ends:
            audit.ended_again += 1
            audit.trained_again += first_ends[ticket] == state == "trained"
        else:
            first_ends[ticket] = state
