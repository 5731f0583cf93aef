"""The journal: a write-ahead log of the learner's decisions, synced before any of them has an effect.

An incarnation's journal is stored in segments, `journal/{incarnation:06d}-{offset:012d}.journal`. Each
begins at its offset, where the one before ends. A record is the length of its body (8 bytes), the CRC-32
of its body (4 bytes) and the body: zlib over msgpack, a map with `kind` and, by kind,

    header      the settings, model_folder, steps and machine that the learner was started with
    batch       step, version, groups (encoded ScoredGroups in order), the settings and reward_weights
                that chose it, its metrics so far
    version     version, hash: weights that are announced next
    evaluation  version, questions, asked: of so many questions, those whose tickets are issued
    answers     version: some answers of the running evaluation came
    evaluated   version, results: its answers
    tickets     before tickets are issued, see TicketFlow.issue_tickets
    rejoin      tickets had ended when another server process answered
    no signal   the run ended with NoSignal
    end         tickets were open when the run ended

Every record also has `ends`, which maps the tickets that ended since the last record to [state,
reason], and `ledger`, the learner's table after it. Any record may have `answers`, those of the running
evaluation since the last one. If a kill interrupts the last record, the next incarnation cuts it.
"""

from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from penstock.common.failpoint import failpoint
from penstock.common.files.atomic import append_whole, sync_path
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.journal.claims import Position
from penstock.common.journal.segments import encode_record


class Journal:
    """Appends the records of one incarnation, `folder.incarnation`, to files in the run's folder.

    A record that would make a file longer than `segment_bytes` begins the next file; a file with one
    record may be longer. Creating a Journal creates its first file, and its folder if missing. Raise
    DiskFull if the disk stays full, FileExistsError if that file is there.
    """

    def __init__(self, folder: LearnerFolder, segment_bytes: int = 64 << 20) -> None:
        folder.journal.mkdir(parents=True, exist_ok=True)
        self.incarnation = folder.incarnation
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._start = self._size = 0  # of the newest segment
        self._file = self._open_segment()

    def append(self, kind: str, **fields: Any) -> Position:
        """Write a record of `kind` with `fields`, sync it to disk, and return the position after it.

        The kinds and their fields (plain data) are listed at the top of the file. A record that does not
        fit in the present file begins a new one. A full disk is waited for, and nothing half written
        stays. Raise DiskFull if no room comes, FileExistsError if the new file is there already.
        """
        record = encode_record({"kind": kind, **fields})
        if self._size and self._size + len(record) > self._segment_bytes:
            self._file.close()
            self._start, self._size = self._start + self._size, 0
            self._file = self._open_segment()
        failpoint("journal.before")
        write = partial(append_whole, self._file, record, self._size)
        path = self._folder.segment(self.incarnation, self._start)
        self._folder.disk.write(f"the journal's record of {kind!r}", path, write, len(record))
        self._size += len(record)
        failpoint("journal.synced")
        return Position(self.incarnation, self._start + self._size)

    def _open_segment(self) -> FileIO:
        """Create the file in which the journal continues and return it, open for writing.

        Raise DiskFull if the disk stays full, FileExistsError if the file is there already.
        """
        path = self._folder.segment(self.incarnation, self._start)
        return self._folder.disk.write("the journal's next file", path, partial(_create, path))


def _create(path: Path) -> FileIO:
    """Create the file `path` and return it, open for unbuffered writing of bytes. Sync its folder.

    If that fails, delete the file. Raise OSError then, FileExistsError if the file is there already.
    """
    file = path.open("xb", buffering=0)
    try:
        sync_path(path.parent)
    except OSError:
        file.close()
        path.unlink()
        raise
    return file
