"""All that reads the files of a run: the learner's next start, and the commands for people."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import read_claims
from penstock.common.wire.codec import encode, pack
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import ScoredGroup
from penstock.deploy.evaluate import read_results
from penstock.deploy.samples import Samples, read_rows
from penstock.learner.replay import _metrics
from penstock.learner.state.best_model import keep_if_best
from penstock.learner.state.incarnations import read_nonce
from penstock.runs import read_journal
from tests.fuzz.expected import check_text, require
from tests.fuzz.folder import WrittenRun, resume


class Readers:
    """The readers of a run's files, and what they make of the folder as it was written."""

    def __init__(self, written: WrittenRun) -> None:
        self._written = written
        self._records = self._journal(written.folder)
        by_kind: dict[str, tuple[Callable[[Path, bool], object], ...]] = {
            "journal": (self._read_journal, self._resume),
            "claim": (self._claims, self._read_journal, self._resume),
            "checkpoint": (self._resume,),
            "best": (self._best,),
            "lines": (self._lines, self._resume),
            "results": (lambda folder, _: read_results(RunFolder(folder).results("eval")),),
            "table": (self._tables,),
            "nonce": (lambda folder, _: read_nonce(RunFolder(folder)),),
        }
        self._by_kind = by_kind

    def read(self, kind: str, folder: Path, changed: Path) -> str:
        """Read a folder with one changed file by all readers. Return "read" or "refused".

        Raise Wrong if a reader makes something else of damage, or does not name the file it refuses.
        """
        damaged, subject = kind.startswith("damaged"), kind.split()[1]
        refused = False
        for reader in self._by_kind[subject]:
            try:
                reader(folder, damaged and subject != "claim")
            except PenstockError as error:
                refused = True
                check_text(str(error))
                named = str(folder) in str(error) or changed.name in str(error)
                require(named, f"{type(error).__name__} does not name {changed.name}: {error!s:.200}")
                require(isinstance(error, ConfigError), f"{type(error).__name__}: {error!s:.200}")
        return "refused" if refused else "read"

    def _journal(self, folder: Path) -> list[bytes]:
        """Return a run's records as bytes."""
        found = []
        for record in read_journal(folder):
            fields = dict(record.fields)
            for name in ("groups", "filtered"):
                fields[name] = [encode(one) for one in fields.get(name, ())]
            found.append(pack([record.kind, fields]))
            require(all(isinstance(one, ScoredGroup) for one in record.groups), "a group that is none")
        return found

    def _read_journal(self, folder: Path, damaged: bool) -> None:
        found = self._journal(folder)
        require(not damaged or found == self._records[: len(found)], "damage is read as another record")

    def _resume(self, folder: Path, damaged: bool) -> None:
        step, weights = resume(folder, self._written.issued)
        right = not damaged or self._written.weights.get(step) == weights
        require(right, f"the resume reaches step {step} with other weights")

    def _claims(self, folder: Path, _damaged: bool) -> None:
        for claim in read_claims(RunFolder(folder)).values():
            numbers = (claim.incarnation, claim.parent, claim.parent_length)
            require(all(type(number) is int and number >= 0 for number in numbers), f"{claim!r:.200}")
            require(type(claim.holder) is str, f"a holder {claim.holder!r:.60}")

    def _best(self, folder: Path, _damaged: bool) -> None:
        owner = LearnerFolder(folder, RunFolder(folder).newest_incarnation())
        keep_if_best(owner, Version(2, 2), "eval/rewards/accuracy/mean", 0.15, 1)

    def _lines(self, folder: Path, _damaged: bool) -> None:
        for step in (None, 0):
            Samples(run=folder, step=step, evaluations=True).evaluated()
        [*_metrics(RunFolder(folder).metrics)]

    def _tables(self, folder: Path, _damaged: bool) -> None:
        rows = read_rows(folder)
        for choice in ("best", "no_spread", "truncated", "failed"):
            try:
                Samples(run=folder, **{choice: True}).chosen(rows)
            except ConfigError as error:
                if not str(error).startswith("none of "):
                    raise
        Samples(run=folder).by_difficulty(rows)
        Samples(run=folder, compare=[2, 3]).compared([2, 3])
