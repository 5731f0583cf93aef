"""The journal: a write-ahead log of everything the learner decided, synced before it acts.

One file per incarnation, `journal/{incarnation:06d}.journal`. A record is its length (8 bytes), the
CRC-32 of its body (4 bytes) and the body in msgpack: a map with `kind` and, per kind,

    header      what this learner was started with: settings, model_folder, steps, threads, ranks
    batch       step, version, groups (encoded ScoredGroups in order), the settings and reward_weights
                it was formed with, its metrics so far; ends, ledger
    evaluation  version, questions: the eval tickets that were issued; ledger
    evaluated   version, results: what came of them; ends, ledger
    ask again   ends, ledger: dropped tickets whose questions are to be repeated
    no signal   ends, ledger: why the run ended with NoSignal
    end         ends, ledger: tickets left over when the run ended

`ends` maps the tickets that ended since the last record to [state, reason]; `ledger` is the learner's
table after it. A torn last record is cut when the next incarnation claims the run.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.codec import pack, unpack
from common.errors import MalformedMessage
from common.failpoint import failpoint
from common.files import sync_folder

_PREFIX = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two records: the incarnation's file and the offset in it, in bytes."""

    incarnation: int
    offset: int


class Journal:
    """The file that one incarnation appends to."""

    def __init__(self, run_folder: Path, incarnation: int) -> None:
        folder = run_folder / "journal"
        folder.mkdir(parents=True, exist_ok=True)
        self.incarnation = incarnation
        self._file = segment_path(run_folder, incarnation).open("xb")
        sync_folder(folder)

    def append(self, kind: str, **fields: Any) -> Position:
        """Write one record and sync it; returns the position after it."""
        body = pack({"kind": kind, **fields})
        failpoint("journal.before")
        self._file.write(_PREFIX.pack(len(body), zlib.crc32(body)) + body)
        self._file.flush()
        failpoint("journal.written")
        os.fsync(self._file.fileno())
        failpoint("journal.synced")
        return Position(self.incarnation, self._file.tell())

    def close(self) -> None:
        """Close the file; every record is on disk already."""
        self._file.close()


def segment_path(run_folder: Path, incarnation: int) -> Path:
    """Where an incarnation's journal lies."""
    return run_folder / "journal" / f"{incarnation:06d}.journal"


def read_segment(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Any]]:
    """The records of a file between two offsets, each with the offset after it.

    Stops at a torn or corrupt record: nothing after it was ever relied on.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(start)
        offset = start
        while end is None or offset < end:
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size:
                return
            length, checksum = _PREFIX.unpack(prefix)
            body = file.read(min(length, path.stat().st_size))
            if len(body) < length or zlib.crc32(body) != checksum:
                return
            try:
                record = unpack(body)
            except MalformedMessage:
                return
            offset += _PREFIX.size + length
            yield offset, record


def valid_length(path: Path) -> int:
    """Length of the whole records at the file's beginning, in bytes."""
    return max((offset for offset, _ in read_segment(path)), default=0)
