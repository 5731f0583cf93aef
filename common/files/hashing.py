"""BLAKE3 hashes of versions, checkpoints and files for other hosts, computed on all cores."""

import hashlib
from pathlib import Path

from blake3 import blake3

_CHUNK = 1 << 22


def new_digest() -> blake3:
    """Return a hash without content yet: `update(bytes)` adds to it, `hexdigest()` has 64 digits."""
    return blake3(max_threads=blake3.AUTO)


def hash_file(path: Path) -> str:
    """Return the hash of a file's content in hexadecimal. Raise OSError if it cannot be read."""
    room = max(1, min(_CHUNK, path.stat().st_size))
    digest = new_digest() if room == _CHUNK else blake3()  # which starts no threads
    buffer = memoryview(bytearray(room))  # each thread that hashes keeps as much memory afterwards
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def has_hash(path: Path, expected: str) -> bool:
    """Return whether a file has this hash: BLAKE3, or SHA-256 as in older checkpoints. Raise OSError."""
    if hash_file(path) == expected:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == expected
