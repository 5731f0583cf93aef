"""The journal's files: the form of a record, and which records can be read."""

import re
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError, MalformedMessage
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import get_logger
from penstock.common.wire.codec import pack, unpack

log = get_logger(__name__)

_PREFIX = struct.Struct("<QI")
_MAYBE_PREFIX = re.compile(rb"(?=(?!\0{4})[\s\S]{4}\0{4})")
"""Where a record below 4 GiB may begin: the upper 4 bytes of its length are zero, the lower are not."""

_MOST_CHECKED = 1 << 32
"""Most bytes of checksums in the search for whole records after damage: about two seconds."""

_ZLIB_LEVEL = 1
"""Token ids, masks and texts shrink to a fifth, log-probabilities hardly. Level 6 takes three times as
long and saves a tenth."""

_LEAST_ROOM, _RATIO = 16 << 20, 8
"""The largest record: 16 MiB, and 8 bytes for each compressed byte. A record that would be larger is
stored uncompressed, so one that is larger was not written by a learner."""

REMEDY = "Put the file back from a copy, or start a new run with LEARNER_MODEL=CHECKPOINT/model"


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of an incarnation's journal. `start` is the offset of its first byte in that journal."""

    path: Path
    start: int

    @property
    def end(self) -> int:
        """The offset in the journal at which the file ends, by its size. OSError without a file."""
        return self.start + self.path.stat().st_size


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The bytes after the last usable record of a journal."""

    path: Path
    offset: int  # in the file `path`
    length: int  # in bytes, later files included
    torn: bool  # at the end of the journal: a kill may have interrupted an append
    complete: bool  # as long as its prefix states: a kill alone cannot cause this, a power cut can


def encode_record(record: dict[str, Any]) -> bytes:
    """Return a record as the bytes in the file: length (8 bytes), CRC-32 (4), zlib-compressed body.

    A record that shrinks so much that a reader would refuse it is stored uncompressed in zlib's form.
    Raise MalformedMessage for a value that is no plain data (texts, numbers, bytes, lists, maps).
    """
    plain = pack(record)
    body = zlib.compress(plain, _ZLIB_LEVEL)
    if len(plain) > _largest(body):
        body = zlib.compress(plain, 0)
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


def _largest(body: bytes) -> int:
    """Return how many bytes a body may have when decompressed: 16 MiB, and 8 for each of its bytes."""
    return _LEAST_ROOM + _RATIO * len(body)


def _decode_body(body: bytes) -> dict[str, Any]:
    """Return the record in `body`, its compressed bytes. Raise zlib.error or MalformedMessage.

    A body is refused if it is cut off, is larger than a learner writes, or holds no map with a text
    `kind`.
    """
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(body, _largest(body) + 1)
    if not unpacker.eof or unpacker.unused_data or len(plain) > _largest(body):
        raise zlib.error(f"a journal's record is cut off, or larger than a learner writes. {REMEDY}")
    record = unpack(plain, most=len(plain))
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        raise MalformedMessage(f"a journal's record is no map with a text `kind`, as expected. {REMEDY}")
    return record


def list_segments(run_folder: RunFolder, incarnation: int) -> list[Segment]:
    """Return the files of an incarnation's journal, in order of their start; [] if it has none."""
    found = run_folder.journal.glob(f"{incarnation:06d}-*.journal")
    segments = [Segment(path, int(path.stem.partition("-")[2])) for path in found]
    return sorted(segments, key=lambda segment: segment.start)


def read_journal(
    run_folder: RunFolder, incarnation: int, start: int = 0, end: int = sys.maxsize
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield an incarnation's records from the offset `start` to `end`, each with the offset after it.

    `start` is an offset between two records. A record that ends after `end` is left out. Stop early,
    without an error, at a torn or damaged record and where a file is missing.
    """
    for segment in list_segments(run_folder, incarnation):
        if segment.start > start:
            return
        if segment.end > start:
            for offset, record in _read_segment(segment, start, end):
                yield offset, record
                start = offset


def _read_segment(segment: Segment, offset: int, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield one file's records from `offset` to `end` of the journal, each with the offset after it.

    Stop at the first record that is torn, damaged, or ends after `end`.
    """
    size = segment.end - segment.start
    with segment.path.open("rb") as file:
        file.seek(offset - segment.start)
        while offset < end and len(prefix := file.read(_PREFIX.size)) == _PREFIX.size:
            length, checksum = _PREFIX.unpack(prefix)
            offset += _PREFIX.size + length
            body = file.read(min(length, size))
            if offset > end or len(body) < length or zlib.crc32(body) != checksum:
                return
            try:
                record = _decode_body(body)
            except (zlib.error, MalformedMessage):
                return
            yield offset, record


def valid_length(run_folder: RunFolder, incarnation: int, start: int = 0) -> int:
    """Return the offset after the last whole record that follows `start`; `start` if none does.

    `start` is an offset between two records. Log what lies after the result: an interrupted record as a
    warning, damage as an error. Raise ConfigError if the journal begins after `start`.
    """
    found = list_segments(run_folder, incarnation)
    if found and found[0].start > start:
        raise ConfigError(explain_gap(run_folder, incarnation, start))
    end = max((offset for offset, _ in read_journal(run_folder, incarnation, start)), default=start)
    if (rest := left_out(run_folder, incarnation, end)) is None:
        return end
    about = {"file": str(rest.path), "offset": rest.offset, "bytes_left_out": rest.length}
    if not rest.torn:
        log.error("The journal is damaged: no record from this offset on can be used.", **about)
    elif rest.complete:
        log.error("The last record of the journal is damaged and cut: its step is repeated.", **about)
    else:
        log.warning("The last record of the journal was interrupted and is cut.", **about)
    return end


def left_out(run_folder: RunFolder, incarnation: int, end: int) -> LeftOut | None:
    """Return what an incarnation's journal holds after `end`, the end of its whole records, else None.

    The result's `path` and `offset` are the file and its byte where this begins. It is `torn`, as a kill
    interrupts an append, if it lies in one file and no whole record begins in it after its first byte.
    It is `complete` if, besides, all bytes of its first record are there, with a wrong checksum.
    """
    rest = [segment for segment in list_segments(run_folder, incarnation) if segment.end > end]
    if not rest:
        return None
    first = rest[0]
    offset, length = max(0, end - first.start), rest[-1].end - end
    data = first.path.read_bytes()[offset:]
    fits = _checksum_fits(data, 0)  # True if its append ended since it was read
    # An interrupted append leaves no whole record after its own.
    more = not fits and _may_hold_record(data)
    torn = len(rest) == 1 and first.start <= end and not more
    return LeftOut(first.path, offset, length, torn, torn and fits is False)


def _may_hold_record(data: bytes) -> bool:
    """Return whether a whole record begins in `data` after the first byte.

    Each place where a record may begin costs a checksum over the record's length: half of 64 MiB at 8
    million places would take hours. After 4 GiB of checksums the search is given up with True.
    """
    checked = 0
    for found in _MAYBE_PREFIX.finditer(data, 1):
        fits = _checksum_fits(data, found.start())
        checked += 0 if fits is None else _PREFIX.unpack_from(data, found.start())[0]
        if fits or checked > _MOST_CHECKED:
            return True
    return False


def _checksum_fits(data: bytes, place: int) -> bool | None:
    """Return whether the record at byte `place` of `data` has the checksum that its prefix states.

    Return None if the record is cut off by the end of `data`, or has the length 0.
    """
    first = place + _PREFIX.size
    length, checksum = _PREFIX.unpack_from(data, place) if first <= len(data) else (0, 0)
    if not 0 < length <= len(data) - first:
        return None
    return bool(zlib.crc32(data[first : first + length]) == checksum)


def explain_gap(run_folder: RunFolder, incarnation: int, offset: int, end: int | None = None) -> str:
    """Return the text of an error: records of an incarnation's journal cannot be read, why, what to do.

    The records are those from byte `offset` of this journal on, to byte `end` unless that is None. The
    text says whether the journal begins later, has no file, or is damaged, and in which file.
    """
    found = list_segments(run_folder, incarnation)
    until = f" to {end}" if end is not None else ""
    needed = f"the journal of incarnation {incarnation} is needed from offset {offset}{until}"
    if not found or found[0].start > offset:
        there = f"it begins at offset {found[0].start}" if found else "it has no file"
        return (
            f"{run_folder.journal}: {needed}, but {there}. With LEARNER_JOURNAL_RETENTION=resume "
            "records before the checkpoints are deleted: the run can be resumed, but a replay needs "
            f"LEARNER_JOURNAL_RETENTION=all. {REMEDY}"
        )
    damaged = [segment for segment in found if segment.start <= offset][-1]
    return f"{damaged.path}: damaged or cut off at byte {offset - damaged.start}, but {needed}. {REMEDY}"


def segments_before(run_folder: RunFolder, incarnation: int, offset: int) -> list[Path]:
    """Return the journal files that hold only records before the byte `offset` of `incarnation`.

    These are all files of older incarnations, and those of `incarnation` that end at or before `offset`
    of its journal, but never its newest one. They are in order of incarnation and start.
    """
    files = sorted(run_folder.journal.glob("*-*.journal"))
    older = [path for path in files if int(path.name.partition("-")[0]) < incarnation]
    own = pairwise(list_segments(run_folder, incarnation))
    return older + [segment.path for segment, after in own if after.start <= offset]
