"""Checks of files that are taken out, one at a time: the fuzz must see each."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from penstock.common.journal import claims, segments
from penstock.common.wire.codec import pack, unpack
from penstock.deploy import evaluate, samples
from penstock.learner.state import best_model, checkpoint, incarnations
from tests.fuzz.cases import FileCases
from tests.fuzz.files import PREFIX, bomb, records
from tests.fuzz.run import log_nothing, memory_folder


class Equal(int):
    """A checksum that fits."""

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = int.__hash__


def without_check(kind: type, value: Any, where: str) -> Any:
    """In place of fields_as."""
    return value


def without_guard(*_: object) -> Any:
    """In place of reading."""
    return nullcontext()


def with_body(path: Path, body: bytes, checksum: int | None = None) -> None:
    """Replace the body of a journal file's first record, and its checksum if one is given."""
    data = path.read_bytes()
    start, end = records(data)[0]
    old = PREFIX.unpack_from(data, start)[1]
    path.write_bytes(
        data[:start] + PREFIX.pack(len(body), old if checksum is None else checksum) + body + data[end:]
    )


def other_record(path: Path) -> None:
    """Another record of the same form, without its checksum."""
    data = path.read_bytes()
    start, end = records(data)[0]
    record = unpack(zlib.decompress(data[start + PREFIX.size : end]))
    with_body(path, zlib.compress(pack(record | {"step": 7}), 1))


def put(**changes: object) -> Callable[[Path], None]:
    """Change fields of a JSON file."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes)) and None


def other_column(path: Path) -> None:
    """A table with a text for a number."""
    rows = [row | {"advantage": "x"} for row in parquet.read_table(path).to_pylist()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def own_zlib(**changes: object) -> SimpleNamespace:
    """The module zlib as the journal uses it, with changes."""
    return SimpleNamespace(**{**vars(zlib), **changes})


class Boundless:
    """A decompressor that heeds no limit."""

    def __init__(self) -> None:
        self._own = zlib.decompressobj()
        self.unused_data = b""

    def decompress(self, body: bytes, _limit: int) -> bytes:
        """Return everything."""
        return self._own.decompress(body)

    @property
    def eof(self) -> bool:
        """Whether all was read."""
        return self._own.eof


@dataclass(frozen=True)
class Plant:
    """A change of a file, and the check that is taken out: its module, name and what replaces it."""

    kind: str
    pattern: str
    change: Callable[[Path], None]
    module: Any
    name: str
    without: Any


ROW_OF_NUMBERS = '{"step": 0, "index": 0, "columns": {}, "completions": [1]}\n'
START = {"incarnation": 2, "offset": 0}
PLANTED = [
    Plant("damaged journal", "journal/000002-000000000000.journal", other_record,
          segments, "zlib", own_zlib(crc32=Equal)),
    Plant("rewritten journal", "journal/000002-000000000000.journal",
          lambda path: with_body(path, bomb(), zlib.crc32(bomb())),
          segments, "zlib", own_zlib(decompressobj=Boundless)),
    Plant("rewritten claim", "claims/000002.json", put(holder=[1]),
          claims, "fields_as", without_check),
    Plant("damaged checkpoint", "checkpoints/000002-*/state.json", put(step=3, position=START),
          checkpoint, "has_hash", lambda *_: True),
    Plant("rewritten best", "best/*/best.json", put(value="x"), best_model, "fields_as", without_check),
    Plant("damaged results", "eval_results.json", lambda path: path.write_text("{") and None,
          evaluate, "reading", without_guard),
    Plant("rewritten lines", "evaluations.jsonl",
          lambda path: path.write_text(ROW_OF_NUMBERS) and None,
          samples, "reading", without_guard),
    Plant("rewritten table", "completions/completions_00003.parquet", other_column,
          samples, "_check_row", lambda _: None),
    Plant("damaged nonce", "nonce", lambda path: path.write_bytes(b"\xff") and None,
          incarnations, "reading", without_guard),
]  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    log_nothing()
    with memory_folder() as folder:
        yield FileCases(1, folder)


def judge(cases: FileCases, plant: Plant) -> Any:
    """The fault that the fuzz finds in a run with the planted file."""
    log_nothing()
    with cases.copy() as copied:
        (path,) = copied.glob(plant.pattern)
        plant.change(path)
        return cases.judge(plant.kind, copied, path, "planted")[1]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.kind)
def test_a_check_that_is_missing_is_noticed(cases, plant, monkeypatch):
    assert judge(cases, plant) is None
    monkeypatch.setattr(plant.module, plant.name, plant.without)
    assert judge(cases, plant) is not None
