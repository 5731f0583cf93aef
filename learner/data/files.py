"""Rows of a file: JSON lines, a JSON list, CSV, Parquet or Arrow; JSON and CSV also with .gz."""

import csv
import glob
import gzip
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common.errors import DataError
from penstock.common.files.reading import explain, parse_json
from penstock.common.log import get_logger
from penstock.common.text import short
from penstock.common.wire.plain import brief

if TYPE_CHECKING:
    from datasets import Dataset

log = get_logger(__name__)

_TEXTS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_KINDS = {
    **_TEXTS, **{f"{ending}.gz": kind for ending, kind in _TEXTS.items()},
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""Endings of files, each with its name in the library `datasets`."""
ENDINGS = tuple(_KINDS)


def kind_of(path: Path) -> str:
    """Return the kind of a file by its ending, in any case: json, csv, parquet or arrow; else ""."""
    return _KINDS.get(_ending(path), "")


def _ending(path: Path) -> str:
    """Return the ending of a file in small letters: ".csv", ".csv.gz"."""
    last = "".join(path.suffixes[-2:]) if path.suffix.lower() == ".gz" else path.suffix
    return last.lower()


def separator_of(path: Path) -> str:
    """Return what separates the values of a CSV file: a tab in .tsv files, else a comma."""
    return "\t" if ".tsv" in _ending(path) else ","


def matching_files(path: Path) -> list[Path]:
    """Return the file, or the files that match a pattern such as parts/*.jsonl, by name.

    Raise DataError if there is none.
    """
    names = [str(path)] if path.exists() else sorted(glob.glob(str(path)))
    found = [Path(name) for name in names if Path(name).is_file()]
    if not found:
        problem = "no file matches" if glob.has_magic(str(path)) else "no such file"
        raise DataError(f"{path}: {problem}. Correct LEARNER_DATASET or LEARNER_EVAL_DATASET.")
    return found


def read_file(path: Path) -> "Dataset":
    """Return a file's rows. Raise DataError for a file of another kind, or damaged, or mixed columns."""
    import datasets
    import pyarrow.parquet

    kind = kind_of(path)
    if not kind:
        raise DataError(
            f"{path}: expected a file that ends in {', '.join(ENDINGS)}: rename or convert it"
        )
    if kind == "parquet":
        _refuse_repeated(pyarrow.parquet.read_schema(path).names, str(path))
        return datasets.Dataset.from_parquet(str(path))
    if kind == "arrow":
        return _read_arrow(path)
    # Dataset.from_json would convert texts that look like dates to dates, from_csv 01 to 1.
    rows = read_table(path) if kind == "csv" else read_lines(path)
    try:
        return datasets.Dataset.from_list(rows)
    except UnicodeEncodeError as error:
        problem = "a text holds half a character (a lone surrogate)"
        raise DataError(
            f"{path}: {problem}: {error}. Remove that half from the text, or write the whole character"
        ) from error
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"{path}: a column mixes kinds, such as texts and numbers: {short(error)}"
        ) from error


def _read_arrow(path: Path) -> "Dataset":
    """Return the rows of an Arrow file or stream.

    Raise DataError for a column that is there twice, ArrowException for another file.
    """
    import datasets
    import pyarrow

    try:
        table = pyarrow.ipc.open_file(str(path)).read_all()
    except pyarrow.ArrowInvalid:
        table = pyarrow.ipc.open_stream(str(path)).read_all()
    _refuse_repeated(table.column_names, str(path))
    return datasets.Dataset(datasets.table.InMemoryTable(table))


def _refuse_repeated(names: Sequence[str], where: str) -> None:
    """Raise DataError, which begins with `where`, if a column's name is there twice."""
    if repeated := [short(name) for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{where}: the column {', '.join(repeated)} is there twice: rename one of them")


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file (.tsv: with tabs), every value as text: `01` stays `01`.

    Raise DataError if the file is empty, not UTF-8 or no CSV, if a column has no name or another one's,
    or if a row, which is named, has too few or too many values.
    """
    lines = (line for _, line in _lines(path))
    reader = csv.DictReader(lines, restkey="", strict=True, delimiter=separator_of(path))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error
    names = reader.fieldnames or ()
    if "" in names:
        raise DataError(f"{path}, line 1: a column has no name: name it, or leave it out (index=False)")
    _refuse_repeated(names, f"{path}, line 1")
    for number, row in enumerate(rows, 1):
        if "" in row or None in row.values():
            expected = f"expected {len(names)} columns, as in the first line"
            remedy = "Fill in a missing value, or quote one that has a comma"
            raise DataError(f"{path}, row {number} after the header: {expected}. {remedy}")
    if not rows:
        raise DataError(f"{path} is empty: write rows to the file, or name another one")
    return rows


def read_lines(path: Path) -> list[dict[str, object]]:
    """Return the rows of a file of JSON lines, or of one JSON list. Empty lines are skipped.

    A row that lacks columns of other rows gets None there; their number is logged. A row that is a list
    of turns becomes {"conversations": turns}, as in ShareGPT's files. Raise DataError if the file is
    empty or not UTF-8, or if a line, which is named, is no JSON object, has a key twice, or shares no
    column with the first row.
    """
    rows: list[dict[str, object]] = []
    for number, found in _objects(path):
        row = {"conversations": found} if _is_conversation(found) else found
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object, found {brief(row)}")
        if rows and rows[0].keys().isdisjoint(row):
            there, first = short(", ".join(row), 100), short(", ".join(rows[0]), 100)
            raise DataError(
                f"{path}, line {number}: has {there or 'nothing'}, and none of the first row's columns, "
                f"{first}: give all rows the same columns"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path} is empty: write rows to the file, or name another one")
    columns = dict.fromkeys(name for row in rows for name in row)
    if lacking := sum(len(row) < len(columns) for row in rows):
        log.info(f"{path}: {lacking} of {len(rows)} rows lack columns of others, which are null there.")
    return [{name: row.get(name) for name in columns} for row in rows] if lacking else rows


def _is_conversation(row: object) -> bool:
    """Return whether a row is a list of turns, as in Open-Reasoner-Zero's file."""
    return isinstance(row, list) and bool(row) and all(isinstance(turn, dict) for turn in row)


def _objects(path: Path) -> Iterator[tuple[int, object]]:
    """Yield each line's number and its JSON value; or number and item of the one list in a .json file.

    Raise DataError if the file is not UTF-8, if a line or the list is not readable as JSON, or if it is
    no plain data.
    """
    may_be_list = _ending(path) in (".json", ".json.gz")
    lines = _lines(path)
    first = next((line for _, line in _lines(path) if line.strip()), "")
    if may_be_list and first.lstrip()[:1] == "[":
        yield from enumerate(_parse("".join(line for _, line in lines), f"{path}"), 1)
        return
    form = "one object per line" + (", or one list of objects" * may_be_list)
    for number, line in lines:
        if line.strip():
            yield number, _parse(line, f"{path}, line {number}", f": {brief(line)}. Expected {form}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, without a byte-order mark. Raise DataError if not UTF-8."""
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise DataError(f"{path}: the file is UTF-16, expected UTF-8: save it as UTF-8")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not UTF-8: byte {error.start + 1} of the line is "
                    f"0x{line[error.start]:02x}; save the file as UTF-8"
                ) from error


def _parse(text: str, where: str, more: str = "") -> Any:
    """Return the value of a JSON text. Raise DataError, which begins with `where`, for other texts."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{where}: not readable as JSON ({explain(error)}){more}") from error
