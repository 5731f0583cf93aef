"""Lines from a file's end are those from its beginning, the other way round."""

from __future__ import annotations

import random

import pytest

from penstock.common.files import tail
from penstock.common.files.tail import lines_from_end


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 18])
def test_all_lines_come_with_their_places(tmp_path, monkeypatch, block):
    monkeypatch.setattr(tail, "_BLOCK", block)
    chance = random.Random(block)
    for _ in range(60):
        data = b"".join(
            bytes(chance.choices(b"ab\r\x0b\x85", k=chance.randrange(9)))
            + b"\n" * (chance.random() < 0.9)
            for _ in range(chance.randrange(9))
        )
        path = tmp_path / "file"
        path.write_bytes(data)
        expected, at = [], 0
        with path.open("rb") as file:
            for line in file:
                expected.append((at, line))
                at += len(line)
        assert list(lines_from_end(path)) == expected[::-1]


def test_no_file_has_no_lines(tmp_path):
    assert list(lines_from_end(tmp_path / "none")) == []


def test_a_long_line_is_not_copied_once_per_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "_BLOCK", 64)
    joined = []
    lines = tail._lines

    def counting(data):
        joined.append(len(data))
        return lines(data)

    monkeypatch.setattr(tail, "_lines", counting)
    path = tmp_path / "file"
    path.write_bytes(b"a\n" + b"b" * 10_000 + b"\n")
    assert len(list(lines_from_end(path))) == 2
    assert sum(joined) < 3 * 10_000
