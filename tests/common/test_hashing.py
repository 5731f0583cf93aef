"""The hash of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.common.files.hashing import _CHUNK, has_hash, hash_file, new_digest


def test_it_is_blake3(tmp_path: Path) -> None:
    """The vector of three bytes is that of `b3sum`."""
    (tmp_path / "file").write_bytes(b"abc")
    known = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert hash_file(tmp_path / "file") == known


@pytest.mark.parametrize("size", [0, 1, _CHUNK, _CHUNK + 1, 3 * _CHUNK - 1])
def test_every_byte_counts_at_any_size(tmp_path: Path, size: int) -> None:
    content = bytearray(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(content)
    whole = new_digest()
    whole.update(bytes(content))
    assert hash_file(tmp_path / "file") == whole.hexdigest()
    if content:
        content[-1] ^= 1
        (tmp_path / "file").write_bytes(content)
        assert hash_file(tmp_path / "file") != whole.hexdigest()


def test_a_hash_from_before_blake3_is_known(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert has_hash(tmp_path / "file", sha256)
    assert has_hash(tmp_path / "file", hash_file(tmp_path / "file"))
    assert not has_hash(tmp_path / "file", sha256[::-1])
