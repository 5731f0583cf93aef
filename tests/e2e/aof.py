"""What a server's append-only file says: the writes that a kill -9 left, read without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read_file(run_folder: Path) -> bytes:
    """The append-only file of a run's server; fails when the server has rewritten it."""
    folder = run_folder / "queue" / "appendonlydir"
    found = list(folder.glob("*.incr.aof")) if folder.is_dir() else []
    assert len(found) <= 1, f"the server rewrote its file, earlier writes are gone: {found}"
    return found[0].read_bytes() if found else b""


def commands(data: bytes) -> Iterator[list[bytes]]:
    """The commands in an append-only file, each as its words; a torn last one is left out."""
    offset = 0
    while (end := data.find(b"\r\n", offset)) > 0 and data[offset : offset + 1] == b"*":
        words = []
        count, offset = int(data[offset + 1 : end]), end + 2
        for _ in range(count):
            end = data.find(b"\r\n", offset)
            if end < 0:
                return
            size, offset = int(data[offset + 1 : end]), end + 2
            words.append(data[offset : offset + size])
            offset += size + 2
        if offset > len(data):
            return
        yield words


def added(data: bytes, stream: str) -> list[tuple[str, str]]:
    """Entry id and ticket of every XADD to a stream, in order."""
    return [
        (words[2].decode(), words[words.index(b"t") + 1].decode())
        for words in commands(data)
        if words[0].upper() == b"XADD" and words[1] == stream.encode()
    ]
