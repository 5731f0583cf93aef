"""What changed from files of weights to others of the same sizes, exact to the bit: a delta.

After an Update in bfloat16 few entries differ, most of them by one unit in the last place. Files are
compared as 16-bit words. For each word that changed a delta has the gap since the one before and the
difference, as planes of bytes that zstd shrinks to near the entropy of a gap and a sign: 9.1 bits if 1%
of the words changed. As the header is compared too, no tensor needs a name here. A delta of several
files has the blocks of each, one file after the other.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard
from numba import njit

from penstock.common.files.hashing import new_digest

_MAGIC = b"PSTK-D1\n"
_WORDS = 1 << 22
"""Words of a block: so much of each file is worked on at a time, 8 MiB."""
_FAR = 0xFFFF
"""In place of a gap: so many words without a change, and then another gap."""
_HEAD = struct.Struct("<6I")
"""Of a block: its entries, and the compressed bytes of each plane."""
_FEW_MATCHES = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
"""zstd hardly looks for repeated texts: a plane has none, and shrinks by how often a byte is there."""


class BadDelta(ValueError):
    """A delta is damaged, or belongs to a file of another size."""


def write_delta(old: Sequence[Path], new: Sequence[Path], target: Path, most: int) -> int:
    """Write to the file `target` what makes the files `new` of the files `old`; return its bytes.

    Return 0, and leave `target` out or half-way, if it would be more than `most` bytes, or if the files
    differ in size. No other process may change them meanwhile. Raise OSError if a file cannot be read or
    written.
    """
    before, after = ([path.stat().st_size for path in files] for files in (old, new))
    if before != after or not all(size and size % 2 == 0 for size in after):
        return 0
    with target.open("wb") as file:
        file.write(_MAGIC)
        for pair in zip(old, new, strict=True):
            if not _write_changes(*pair, file, most):
                return 0
        return file.tell()


def _write_changes(old: Path, new: Path, file: BinaryIO, most: int) -> bool:
    """Write what makes the file `new` of `old`, until `file` has more than `most` bytes.

    Return whether it is whole. Raise OSError if a file cannot be read or written.
    """
    entries = _Entries.room_for(_WORDS)
    before, after = (np.memmap(one, "<u2", "r") for one in (old, new))  # faster than reading
    for begin in range(0, len(after), _WORDS):
        block = slice(begin, begin + _WORDS)
        _write_block(file, entries.first(_compare(before[block], after[block], entries)))
        if file.tell() > most:
            return False
    return True


def apply_deltas(old: Sequence[Path], deltas: Sequence[Path], targets: Sequence[Path]) -> list[str]:
    """Write to the files `targets` what the deltas, one after the other, make of the files `old`.

    Return the hashes of the written files, which the caller compares with the announced ones. Raise
    BadDelta for a damaged delta, and for one of files of other sizes, OSError if a file cannot be read
    or written.
    """
    with ExitStack() as stack:
        changes = [stack.enter_context(delta.open("rb")) for delta in deltas]
        _check(all(change.read(len(_MAGIC)) == _MAGIC for change in changes), "is none")
        hashes = [_change(*pair, changes) for pair in zip(old, targets, strict=True)]
        _check(not any(change.read(1) for change in changes), "has bytes after the last block")
    return hashes


def _change(old: Path, target: Path, changes: Sequence[BinaryIO]) -> str:
    """Write to the file `target` what the next blocks of deltas make of `old`; return its hash.

    Raise BadDelta, and OSError if a file cannot be read or written.
    """
    digest, size = new_digest(), old.stat().st_size
    _check(size > 0 and size % 2 == 0, f"cannot be for a file of {size} bytes")
    with target.open("wb") as file:
        for block in _blocks(old):
            for change in changes:
                entries = _read_block(change, len(block))
                inside = _apply(block, entries.gaps, entries.less, entries.negative)
                _check(inside, "changes words after the end")
            file.write(part := block.view(np.uint8).data)
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Entries:
    """The changes of a block, arrays (entries,): the gap before each, and the difference.

    `less` is the amount of a difference less 1, and `negative` is 1 if it is one. In a gap of `_FAR`
    words there is no change.
    """

    gaps: np.ndarray
    less: np.ndarray
    negative: np.ndarray

    @classmethod
    def room_for(cls, count: int) -> "_Entries":
        """Return arrays for so many entries."""
        return cls(np.empty(count, "<u2"), np.empty(count, "<u2"), np.empty(count, np.uint8))

    def first(self, count: int) -> "_Entries":
        """Return the first entries, without a copy."""
        return _Entries(self.gaps[:count], self.less[:count], self.negative[:count])


def _check(fine: bool, fault: str) -> None:
    """Raise BadDelta with the fault unless all is fine."""
    if not fine:
        raise BadDelta(f"a delta {fault}")


def _blocks(path: Path) -> Iterator[np.ndarray]:
    """Yield a file as blocks of words; each is overwritten by the next. Raise OSError if not readable.

    It is not mapped into memory: a file that another process cuts would end this one there.
    """
    buffer = np.empty(_WORDS, "<u2")
    with path.open("rb") as file:  # a buffered file fills the whole block, up to the end of the file
        while size := file.readinto(buffer.view(np.uint8).data):
            if size % 2:
                raise OSError(f"{path} became shorter while it was read")
            yield buffer[: size // 2]


def _write_block(file: BinaryIO, entries: _Entries) -> None:
    """Write the entries of a block, each plane of bytes compressed. Raise OSError."""
    compress = zstandard.ZstdCompressor(compression_params=_FEW_MATCHES).compress
    pairs = (entries.gaps.view(np.uint8), entries.less.view(np.uint8))
    planes = [pair[byte::2] for pair in pairs for byte in (0, 1)]
    parts = [compress(plane.tobytes()) for plane in (*planes, np.packbits(entries.negative))]
    file.write(_HEAD.pack(len(entries.gaps), *map(len, parts)))
    file.writelines(parts)


def _read_block(file: BinaryIO, words: int) -> _Entries:
    """Return the entries of the next block, which has so many words. Raise BadDelta."""
    head = file.read(_HEAD.size)
    _check(len(head) == _HEAD.size, "ends in a block's head")
    count, *sizes = _HEAD.unpack(head)
    _check(count <= words, f"has {count} changes of {words} words")
    entries = _Entries.room_for(count)
    for both, pair in zip((entries.gaps, entries.less), (sizes[:2], sizes[2:4]), strict=True):
        for byte, size in enumerate(pair):
            both.view(np.uint8)[byte::2] = _read_plane(file, size, count)
    bits = _read_plane(file, sizes[4], (count + 7) // 8)
    entries.negative[:] = np.unpackbits(bits, count=count)
    return entries


def _read_plane(file: BinaryIO, size: int, expected: int) -> np.ndarray:
    """Return the `expected` bytes that were compressed to the next `size` bytes. Raise BadDelta."""
    part = file.read(min(size, expected + (expected >> 8) + 128))  # the most that zstd makes of them
    try:
        _check(zstandard.frame_content_size(part) == expected, "has a plane of another size")
        plain = zstandard.ZstdDecompressor().decompress(part, max_output_size=expected)
    except zstandard.ZstdError as error:
        raise BadDelta(f"a delta has a plane that cannot be decompressed: {error}") from error
    return np.frombuffer(plain, np.uint8)


def _compare(old: np.ndarray, new: np.ndarray, entries: _Entries) -> int:
    """Store the changes of two blocks (words,) in `entries`, and return how many they are."""
    fours = len(old) // 4 * 4
    stored = entries.gaps, entries.less, entries.negative
    count, free = _compare_fours(old[:fours].view("<u8"), new[:fours].view("<u8"), old, new, *stored)
    return int(_compare_words(old, new, fours, len(old), *stored, count, free)[0])


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _compare_words(
    old: np.ndarray, new: np.ndarray, begin: int, end: int,
    gaps: np.ndarray, less: np.ndarray, negative: np.ndarray, count: int, free: int,
) -> tuple[int, int]:  # fmt: skip
    """Store the changes of the words from `begin` to `end` after `count` entries.

    `free` is the first word after the last change. Return both as they are then.
    """
    for word in range(begin, end):
        change = np.int32(new[word]) - np.int32(old[word])
        if change == 0:
            continue
        while word - free >= _FAR:
            gaps[count], less[count], negative[count] = _FAR, 0, 0
            free, count = free + _FAR, count + 1
        gaps[count], less[count], negative[count] = word - free, abs(change) - 1, change < 0
        free, count = word + 1, count + 1
    return count, free


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _compare_fours(
    old_fours: np.ndarray, new_fours: np.ndarray, old: np.ndarray, new: np.ndarray,
    gaps: np.ndarray, less: np.ndarray, negative: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Store the changes of two blocks, given as words and as four words in one, as most are equal.

    Return how many they are, and the first word after the last one.
    """
    count = free = 0
    for four in range(len(old_fours)):
        if old_fours[four] != new_fours[four]:
            word = 4 * four
            count, free = _compare_words(old, new, word, word + 4, gaps, less, negative, count, free)
    return count, free


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _apply(block: np.ndarray, gaps: np.ndarray, less: np.ndarray, negative: np.ndarray) -> bool:
    """Change the words of a block (words,); return whether all changes lie in it."""
    word = -1
    for entry in range(len(gaps)):
        if gaps[entry] == _FAR:
            word += _FAR
            continue
        word += int(gaps[entry]) + 1
        if word >= len(block):
            return False
        change = np.int32(less[entry]) + 1
        block[word] += np.uint16(-change if negative[entry] else change)
    return True
