"""The journal: a write-ahead log of everything the learner decided, synced before it acts.

An incarnation's journal lies in segments, `journal/{incarnation:06d}-{offset:012d}.journal`, named by
the offset at which they begin; each begins where the one before ends. A record is the length of its
body (8 bytes), the body's CRC-32 (4 bytes) and the body: zlib over msgpack, a map with `kind` and, per
kind,

    header      what this learner was started with: settings, model_folder, steps, machine
    batch       step, version, groups (encoded ScoredGroups in order), the settings and reward_weights
                it was formed with, its metrics so far; ends, ledger
    evaluation  version, questions: the eval tickets that were issued; ledger
    evaluated   version, results: what came of them; ends, ledger
    ask again   ends, ledger: dropped tickets whose questions are to be repeated
    rejoin      ends, ledger: what had ended when another server process answered
    no signal   ends, ledger: why the run ended with NoSignal
    end         ends, ledger: tickets left over when the run ended

`ends` maps the tickets that ended since the last record to [state, reason]; `ledger` is the learner's
table after it. A torn last record is cut when the next incarnation claims the run.
"""

from functools import partial
from typing import Any

from penstock.common.failpoint import failpoint
from penstock.common.files.atomic import append_whole, sync_folder
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.journal.claims import Position
from penstock.common.journal.segments import encode_record

SEGMENT_BYTES = 64 << 20


class Journal:
    """What one incarnation appends to. A full disk is waited for as `disk` says."""

    def __init__(self, folder: LearnerFolder, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.journal.mkdir(parents=True, exist_ok=True)
        self.incarnation = folder.incarnation
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._begin_segment(0)

    def append(self, kind: str, **fields: Any) -> Position:
        """Write one record and sync it; returns the position after it. Raises DiskFull."""
        record = encode_record({"kind": kind, **fields})
        if self._size and self._size + len(record) > self._segment_bytes:
            self._file.close()
            self._begin_segment(self._start + self._size)
        what = f"the journal's record of {kind!r}"
        failpoint("journal.before")
        write = partial(append_whole, self._file, record, self._size)
        self._folder.disk.write(what, self._path, write, len(record))
        self._size += len(record)
        failpoint("journal.synced")
        return Position(self.incarnation, self._start + self._size)

    def close(self) -> None:
        """Close the file; every record is on disk already."""
        self._file.close()

    def _begin_segment(self, start: int) -> None:
        self._start, self._size = start, 0
        self._path = self._folder.segment(self.incarnation, start)
        self._folder.disk.write("the journal's next file", self._path, self._open)

    def _open(self) -> None:
        file = self._path.open("xb", buffering=0)
        try:
            sync_folder(self._path.parent)
        except OSError:
            file.close()
            self._path.unlink()
            raise
        self._file = file
