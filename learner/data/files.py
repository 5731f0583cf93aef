"""Rows of files: JSON lines, a JSON list, CSV, Parquet or Arrow; JSON and CSV also with .gz.

A run and a stream read JSON and CSV by the same function, `text_rows`.
"""

import csv
import glob
import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common.errors import DataError
from penstock.common.files.reading import explain, parse_json
from penstock.common.log import get_logger
from penstock.common.progress import with_progress
from penstock.common.text import short
from penstock.common.wire.limits import MOST_NAMES
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


def matching_files(path: Path) -> list[Path]:
    """Return the file, or the files that match a pattern such as parts/*.jsonl, by name.

    `**` matches folders of any depth. Raise DataError if there is no file.
    """
    names = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))
    found = [Path(name) for name in names if Path(name).is_file()]
    if not found:
        problem = "no file matches" if glob.has_magic(str(path)) else "no such file"
        raise DataError(f"{path}: {problem}. Correct LEARNER_DATASET or LEARNER_EVAL_DATASET.")
    return found


def form_of(paths: Sequence[Path]) -> str:
    """Return how these files are read: "text" for JSON and CSV, else parquet or arrow.

    Raise DataError for a file of another kind, and for files of several forms.
    """
    for path in paths:
        if not kind_of(path):
            expected = f"expected a file that ends in {', '.join(ENDINGS)}"
            raise DataError(f"{path}: {expected}: rename or convert it")
    forms = {"text" if kind_of(path) in ("json", "csv") else kind_of(path): path for path in paths}
    if len(forms) > 1:
        found = ", ".join(map(str, forms.values()))
        raise DataError(f"{found}: files of several forms: name each kind by a pattern of its own")
    return next(iter(forms))


def read_files(paths: Sequence[Path], name: str) -> "Dataset":
    """Return the rows of files, in their order. `name` names the data set in errors.

    A row of JSON that lacks columns of other rows gets None there; the number of these rows is logged.
    Raise DataError for files of another or several kinds, for damage, and for columns of mixed types.
    """
    import datasets

    form = form_of(paths)
    if form != "text":
        check_names_once(paths, form)
        read = datasets.Dataset.from_parquet if form == "parquet" else _read_arrow
        return datasets.concatenate_datasets([read(str(path)) for path in paths])
    texts = (row for path in paths for row in text_rows(path))
    rows = _filled(list(with_progress(texts, f"{name}: lines read")), name)
    try:  # Dataset.from_json would convert texts that look like dates to dates, from_csv 01 to 1.
        return datasets.Dataset.from_list(rows)
    except UnicodeEncodeError as error:
        problem = "a text holds half a character (a lone surrogate)"
        raise DataError(
            f"{name}: {problem}: {error}. Remove that half from the text, or write the whole character"
        ) from error
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(
            f"{name}: a column mixes kinds, such as texts and numbers: {short(error)}"
        ) from error


def _filled(rows: list[dict[str, object]], name: str) -> list[dict[str, object]]:
    """Return the rows, each with the columns of all. Log how many of `name` lacked some."""
    columns = dict.fromkeys(column for row in rows for column in row)
    lacking = sum(len(row) < len(columns) for row in rows)
    if lacking:
        log.info(f"{name}: {lacking} of {len(rows)} rows lack columns of others, which are null there.")
    return [{**columns, **row} for row in rows] if lacking else rows


def _read_arrow(path: str) -> "Dataset":
    """Return the rows of an Arrow file or stream. Raise ArrowException for another file."""
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(_open_arrow(path).read_all()))


def _open_arrow(path: str) -> Any:
    """Return pyarrow's reader of an Arrow file or stream. Raise ArrowException for another file."""
    import pyarrow

    try:
        return pyarrow.ipc.open_file(path)
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_stream(path)


def check_names_once(paths: Sequence[Path], form: str) -> None:
    """Raise DataError if a column is there twice in one of these Parquet or Arrow files."""
    import pyarrow.parquet

    for path in paths:
        parquet = form == "parquet"
        schema = pyarrow.parquet.read_schema(path) if parquet else _open_arrow(str(path)).schema
        _refuse_repeated(schema.names, str(path))


def _refuse_repeated(names: Sequence[str], where: str) -> None:
    """Raise DataError, which begins with `where`, if a column's name is there twice."""
    if repeated := [short(name) for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{where}: the column {', '.join(repeated)} is there twice: rename one of them")


def stream_texts(paths: Sequence[Path], columns: Mapping[str, None]) -> Iterator[dict[str, object]]:
    """Yield the rows of JSON and CSV files one by one, each with these columns, None where it has none.

    Raise DataError as `text_rows` does.
    """
    for path in paths:
        for row in text_rows(path):
            yield {**columns, **row}


def text_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a JSON or CSV file, one by one. Raise DataError if the file has none."""
    empty = True
    for row in _table_rows(path) if kind_of(path) == "csv" else _json_rows(path):
        empty = False
        yield row
    if empty:
        raise DataError(f"{path} is empty: write rows to the file, or name another one")


def _table_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a CSV file (.tsv: with tabs), every value as text: `01` stays `01`.

    Raise DataError if the file is no CSV, if a column has no name or another one's, or if a row, which
    is named, has too few or too many values.
    """
    separator = "\t" if ".tsv" in _ending(path) else ","
    lines = (line for _, line in _lines(path))
    reader = csv.DictReader(lines, restkey="", strict=True, delimiter=separator)
    try:
        names = reader.fieldnames or ()
        if "" in names:
            remedy = "name it, or leave it out (index=False)"
            raise DataError(f"{path}, line 1: a column has no name: {remedy}")
        _refuse_repeated(names, f"{path}, line 1")
        for number, row in enumerate(reader, 1):
            if "" in row or None in row.values():
                expected = f"expected {len(names)} columns, as in the first line"
                remedy = "Fill in a missing value, or quote one that has a comma"
                raise DataError(f"{path}, row {number} after the header: {expected}. {remedy}")
            yield row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from error


def _json_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a file of JSON lines, or of one JSON list. Empty lines are skipped.

    A row that is a list of turns becomes {"conversations": turns}, as in ShareGPT's files. Raise
    DataError if a line, which is named, is no JSON object, or shares no column with the first row, and
    if the rows have over 1024 columns together.
    """
    columns: dict[str, None] | None = None
    for number, found in _objects(path):
        where = f"{path}, line {number}"
        row = {"conversations": found} if _is_conversation(found) else found
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object, found {brief(row)}")
        columns = dict.fromkeys(row) if columns is None else columns
        if columns and columns.keys().isdisjoint(row):
            there, known = short(", ".join(row), 100), short(", ".join(columns), 100)
            raise DataError(
                f"{where}: has {there or 'nothing'}, and none of the columns before, {known}: "
                "give all rows the same columns"
            )
        columns.update(dict.fromkeys(row))
        if len(columns) > MOST_NAMES:
            problem = f"the rows up to here have {len(columns)} columns together"
            raise DataError(f"{where}: {problem}; expected at most {MOST_NAMES}. Name columns alike")
        yield row


def _is_conversation(row: object) -> bool:
    """Return whether a row is a list of turns, each with a speaker, as in Open-Reasoner-Zero's file."""
    return (
        isinstance(row, list)
        and bool(row)
        and all(isinstance(turn, dict) and ("from" in turn or "role" in turn) for turn in row)
    )


def _objects(path: Path) -> Iterator[tuple[int, object]]:
    """Yield each line's number and its JSON value; or number and item of the one list in a .json file.

    Raise DataError if a line or the list is not readable as JSON, or if it is no plain data.
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
