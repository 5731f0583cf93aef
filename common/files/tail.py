"""The lines of a file from its end: of a file that grows with a run, no more is read than is needed."""

import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 18


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, the last one first: where each begins, and its bytes with the line end.

    A last line may lack the line end. Nothing is yielded without a file. The memory is that of the
    longest line and a block.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest: list[bytes] = []  # of a line whose begin was not read yet, the last part first
        while start > 0:
            size = min(_BLOCK, start)
            start -= size
            file.seek(start)
            rest.append(file.read(size))
            if b"\n" not in rest[-1]:
                continue
            first, *others = _lines(b"".join(reversed(rest)))
            at = start + len(first) + sum(map(len, others))
            for line in reversed(others):
                at -= len(line)
                yield at, line
            rest = [first]
        if rest:
            yield 0, b"".join(reversed(rest))


def _lines(data: bytes) -> list[bytes]:
    """Return the lines of `data`, at least one, with their ends; splitlines also splits at "\\r"."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines
