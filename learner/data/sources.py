"""Rows of a data set from wherever it lies: JSON lines, Parquet, CSV, a saved folder, a hub id.

questions.jsonl                       a file
openai/gsm8k:main@e53f048#500         of a hub id: configuration, revision, so many rows of it
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.common.errors import DataError

_HUB = re.compile(r"(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<revision>[^:@#]+))?")
_SHUFFLE_BUFFER = 10_000
"""Rows of a stream that are held to draw the next one from."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set as LEARNER_DATASET names it; `count` 0: all rows."""

    name: str
    config: str | None = None
    revision: str | None = None
    count: int = 0

    @property
    def path(self) -> Path | None:
        """The file or folder it is, if it is one."""
        path = Path(self.name)
        return path if path.suffix in _READERS or path.exists() else None

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Read NAME[:CONFIG][@REVISION][#COUNT]; raises DataError."""
        name, marker, count = text.rpartition("#")
        name = name if marker else text
        if marker and not (count.isdecimal() and int(count)):
            raise DataError(f"{text}: expected a number of rows after #, found {count!r}")
        rows = int(count) if marker else 0
        if Path(name).suffix in _READERS or Path(name).exists():
            return cls(name, count=rows)
        found = _HUB.fullmatch(name)
        if not found:
            raise DataError(f"{text}: expected a file, a folder, or ID[:CONFIG][@REVISION][#ROWS]")
        return cls(found["name"], found["config"], found["revision"], rows)


def load_rows(source: Source, split: str, seed: int) -> Any:
    """A `datasets.Dataset`; with a count, rows drawn by the seed. Raises DataError."""
    import datasets

    datasets.disable_progress_bars()
    rows = _load(source, split, datasets)
    if source.count and source.count < len(rows):
        chosen = np.random.default_rng([seed, len(rows)]).permutation(len(rows))[: source.count]
        return rows.select(sorted(chosen.tolist()))
    return rows


def _load(source: Source, split: str, datasets: Any) -> Any:
    path = source.path
    if path is None:
        return _told(source, split, lambda: datasets.load_dataset(
            source.name, source.config, revision=source.revision, split=split
        ))  # fmt: skip
    if not path.exists():
        raise DataError(f"{source.name}: no such file")
    if path.is_file() and path.suffix not in _READERS:
        raise DataError(
            f"{source.name}: expected a file that ends in {', '.join(_READERS)}: rename or convert it"
        )
    if path.is_file():
        return _told(source, split, lambda: _READERS[path.suffix](path, datasets))
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return _told(source, split, lambda: _saved(path, split, datasets))
    return _told(source, split, lambda: datasets.load_dataset(str(path), split=split))


def _saved(path: Path, split: str, datasets: Any) -> Any:
    """What `save_to_disk` wrote: a data set, or a dictionary of splits."""
    found = datasets.load_from_disk(str(path))
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        raise ValueError(f"it has the splits {', '.join(found)}")
    return found[split]


def _told(source: Source, split: str, load: Callable[[], Any]) -> Any:
    """What `load` returns; its errors as DataError."""
    import datasets
    import pyarrow

    try:
        return load()
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{source.name} (split {split}): cannot be loaded: {error}") from error


def _read_json(path: Path, datasets: Any) -> Any:
    # Not Dataset.from_json: it makes dates of texts that look like dates.
    rows = read_lines(path)
    try:
        return datasets.Dataset.from_list(rows)
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: a text holds half a character (a lone surrogate): {error}") from error
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{path}: a column mixes kinds of values: {error}") from error


_READERS: dict[str, Callable[[Path, Any], Any]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": lambda path, datasets: datasets.Dataset.from_parquet(str(path)),
    ".csv": lambda path, datasets: datasets.Dataset.from_list(read_table(path)),
}


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, all as text: pandas would make 1 of 01. Raises DataError."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error
    for number, row in enumerate(rows, 2):
        if "" in row or None in row.values():
            raise DataError(f"{path}, row {number}: expected {len(reader.fieldnames or ())} columns")
    if not rows:
        raise DataError(f"{path} is empty")
    return rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows; raises DataError naming the first line that is no object or lacks a column.

    Empty lines are passed over.
    """
    columns: set[str] | None = None
    rows = []
    for number, row in _objects(path):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object, found {str(row)[:60]!r}")
        columns = set(row) if columns is None else columns
        if missing := columns - set(row):
            raise DataError(
                f"{path}, line {number}: lacks {', '.join(sorted(missing))}, which the first row has"
            )
        if added := set(row) - columns:
            raise DataError(
                f"{path}, line {number}: has {', '.join(sorted(added))}, which the first row lacks: "
                "give all rows the same columns, null where there is nothing"
            )
        rows.append(row)
    if columns is None:
        raise DataError(f"{path} is empty")
    return rows


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Each line's number and what it holds; or the items of one JSON list, numbered."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        if (
            path.suffix == ".json"
            and next((line for line in file if line.strip()), "").lstrip()[:1] == "["
        ):
            file.seek(0)
            try:
                yield from enumerate(json.load(file), 1)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: not readable as JSON ({error})") from error
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not readable as JSON ({error}): {line.strip()[:60]!r}. "
                    "Expected one object per line"
                    + (", or one list of objects" * (path.suffix == ".json"))
                ) from error


def stream_rows(source: Source, split: str, seed: int | None) -> Iterator[dict[str, Any]]:
    """The rows one after the other, never all in memory or on disk; shuffled in a buffer by a seed.

    Raises DataError.
    """
    import datasets

    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    path = source.path
    if path is not None and (not path.exists() or path.suffix not in kinds):
        raise DataError(f"{source.name}: expected a JSONL, Parquet or CSV file, or a hub id, to stream")

    def load() -> Any:
        if path is not None:
            kind = kinds[path.suffix]
            return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        return datasets.load_dataset(
            source.name, source.config, revision=source.revision, split=split, streaming=True
        )

    rows = _told(source, split, load)
    if seed is not None:
        rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
    remaining = iter(rows.take(source.count) if source.count else rows)
    while (row := _told(source, split, lambda: next(remaining, None))) is not None:
        yield row
