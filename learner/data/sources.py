"""Rows of a data set: a file of JSON lines, Parquet or CSV, a saved folder, or a hub id.

questions.jsonl                       a file
openai/gsm8k:main@e53f048#500         hub id, its configuration and revision; 500 rows of this data set
"""

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common.errors import DataError
from penstock.common.files.reading import explain, parse_json
from penstock.common.text import short
from penstock.common.wire.plain import brief

if TYPE_CHECKING:
    from datasets import Dataset

_HUB = re.compile(r"(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<revision>[^:@#]+))?")
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Endings of files, each with its name in the library `datasets`."""

_SHUFFLE_BUFFER = 10_000
"""Rows of a stream in memory; the next row is drawn from these at random."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set of LEARNER_DATASET. `name` is a file, folder or hub id; `count` 0 means all rows."""

    name: str
    config: str | None = None
    revision: str | None = None
    count: int = 0

    @property
    def path(self) -> Path | None:
        """The path that `name` is, with a known ending or a file or folder there; None for a hub id."""
        path = Path(self.name)
        return path if path.suffix in _KINDS or path.exists() else None

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Return the source of NAME[:CONFIG][@REVISION][#COUNT]. Raise DataError for another form."""
        name, marker, count = text.rpartition("#") if "#" in text else (text, "", "0")
        if marker and not (count.isdecimal() and int(count)):
            raise DataError(f"{text}: expected a number of rows after #, found {count!r}")
        rows = int(count)
        if cls(name).path:
            return cls(name, count=rows)
        found = _HUB.fullmatch(name)
        if not found:
            raise DataError(
                f"{text}: no such file or folder is there, so expected ID[:CONFIG][@REVISION][#ROWS] in "
                "LEARNER_DATASET or LEARNER_EVAL_DATASET"
            )
        return cls(found["name"], found["config"], found["revision"], rows)


def load_rows(source: Source, split: str, seed: int) -> "Dataset":
    """Return the rows of a data set; if the source has a count, that many rows drawn by the seed.

    A hub id is downloaded. Raise DataError if the rows cannot be read.
    """
    import datasets

    datasets.disable_progress_bars()
    with _as_data_error(source, split):
        rows = _load(source, split)
    if source.count and source.count < len(rows):
        chosen = np.random.default_rng([seed, len(rows)]).permutation(len(rows))[: source.count]
        return rows.select(sorted(chosen.tolist()))
    return rows


def _load(source: Source, split: str) -> "Dataset":
    """Return all rows of a data set. Raise DataError, ValueError, OSError or the libraries' errors."""
    import datasets

    path = source.path
    if path is None:
        return datasets.load_dataset(source.name, source.config, revision=source.revision, split=split)
    if not path.exists():
        raise DataError(f"{source.name}: no such file. Correct LEARNER_DATASET or LEARNER_EVAL_DATASET.")
    if path.is_file():
        return _read_file(path)
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return datasets.load_dataset(str(path), split=split)
    saved = datasets.load_from_disk(str(path))  # a data set, or a dictionary of splits
    if isinstance(saved, dict) and split not in saved:
        raise ValueError(f"it has the splits {', '.join(saved)}")
    return saved[split] if isinstance(saved, dict) else saved


@contextmanager
def _as_data_error(source: Source, split: str) -> Iterator[None]:
    """Raise DataError, naming source and split, for errors of the block's libraries and files."""
    import datasets
    import pyarrow

    try:
        yield
    except (
        datasets.exceptions.DatasetsError, pyarrow.ArrowException, OSError, ValueError, RecursionError
    ) as error:  # fmt: skip
        raise DataError(
            f"{source.name} (split {split}): cannot be loaded: {short(error, 500)}. "
            "Correct LEARNER_DATASET or LEARNER_DATASET_SPLIT (for evaluation LEARNER_EVAL_DATASET or "
            "LEARNER_EVAL_SPLIT)."
        ) from error


def _read_file(path: Path) -> "Dataset":
    """Return a JSON, Parquet or CSV file's rows. Raise DataError for another kind, or mixed columns."""
    import datasets

    if path.suffix not in _KINDS:
        raise DataError(
            f"{path}: expected a file that ends in {', '.join(_KINDS)}: rename or convert it"
        )
    if path.suffix == ".parquet":
        return datasets.Dataset.from_parquet(str(path))
    # Dataset.from_json would convert texts that look like dates to dates, from_csv 01 to 1.
    rows = read_table(path) if path.suffix == ".csv" else read_lines(path)
    try:
        return datasets.Dataset.from_list(rows)
    except UnicodeEncodeError as error:
        problem = "a text holds half a character (a lone surrogate)"
        raise DataError(
            f"{path}: {problem}: {error}. Remove the half from the text, or write the whole character"
        ) from error
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"{path}: a column mixes kinds, such as texts and numbers: {short(error)}"
        ) from error


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, every value as text: `01` stays `01`.

    Raise DataError if the file is empty or no CSV, if a column has no name, or if a row, which is named,
    has too few or too many values. Raise UnicodeDecodeError if the file is not UTF-8.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error
    if "" in (reader.fieldnames or ()):
        raise DataError(f"{path}, line 1: a column has no name: name it, or leave it out (index=False)")
    for number, row in enumerate(rows, 1):
        if "" in row or None in row.values():
            expected = f"expected {len(reader.fieldnames or ())} columns, as in the first line"
            remedy = "Fill in a missing value, or quote one that has a comma"
            raise DataError(f"{path}, row {number} after the header: {expected}. {remedy}")
    if not rows:
        raise DataError(f"{path} is empty: write rows to the file, or name another one")
    return rows


def read_lines(path: Path) -> list[dict[str, object]]:
    """Return the rows of a file of JSON lines, or of one JSON list. Empty lines are skipped.

    Raise DataError if the file is empty, or if a line, which is named, is no JSON object or has other
    columns than the first row.
    """
    columns: set[str] | None = None
    rows: list[dict[str, object]] = []
    for number, row in _objects(path):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object, found {brief(row)}")
        columns = set(row) if columns is None else columns
        if missing := ", ".join(sorted(columns - set(row))):
            raise DataError(f"{path}, line {number}: lacks {short(missing)}, which the first row has")
        if added := ", ".join(sorted(set(row) - columns)):
            raise DataError(
                f"{path}, line {number}: has {short(added)}, which the first row lacks: "
                "give all rows the same columns, null where there is nothing"
            )
        rows.append(row)
    if columns is None:
        raise DataError(f"{path} is empty: write rows to the file, or name another one")
    return rows


def _objects(path: Path) -> Iterator[tuple[int, object]]:
    """Yield each line's number and its JSON value; or number and item of the one list in a .json file.

    Raise DataError if a line or the list is not readable as JSON, or is no plain data.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        if path.suffix == ".json" and first.lstrip()[:1] == "[":
            yield from enumerate(_parse(file.read(), f"{path}"), 1)
            return
        form = "one object per line" + (", or one list of objects" * (path.suffix == ".json"))
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse(line, f"{path}, line {number}", f": {brief(line)}. Expected {form}")


def _parse(text: str, where: str, more: str = "") -> Any:
    """Return the value of a JSON text. Raise DataError, which begins with `where`, for other texts."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where}: not readable as JSON ({explain(error)}){more}") from error


def stream_rows(source: Source, split: str, seed: int | None) -> Iterator[dict[str, object]]:
    """Yield the rows of a data set without keeping all of them in memory or on disk.

    With a seed, the rows are shuffled in a buffer of 10,000. Raise DataError if they cannot be read.
    """
    import datasets

    path = source.path
    if path is not None and (not path.exists() or path.suffix not in _KINDS):
        expected = f"expected a hub id or an existing file that ends in {', '.join(_KINDS)}"
        raise DataError(f"{source.name}: {expected}. Correct it, or LEARNER_DATASET_STREAMING=false")

    with _as_data_error(source, split):
        if path is not None:
            kind = _KINDS[path.suffix]
            rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        else:
            rows = datasets.load_dataset(
                source.name, source.config, revision=source.revision, split=split, streaming=True
            )
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        yield from rows.take(source.count) if source.count else rows
