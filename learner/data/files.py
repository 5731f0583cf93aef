"""Rows of files: JSON lines, a JSON list, CSV, Parquet or Arrow; JSON and CSV also with .gz.

A run and a stream read JSON and CSV by the same function, `text_rows`.
"""

import csv
import glob
import gzip
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.common.errors import DataError
from penstock.common.files.reading import explain, parse_json
from penstock.common.log import get_logger
from penstock.common.progress import with_progress
from penstock.common.text import short
from penstock.common.wire.limits import MOST_NAMES
from penstock.common.wire.plain import brief

if TYPE_CHECKING:
    from datasets import Dataset

Rows: TypeAlias = "Dataset | list[dict[str, object]]"
"""Rows with all columns each: of Parquet, Arrow or the hub, or of JSON and CSV."""

log = get_logger(__name__)

_TEXTS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_KINDS = {
    **_TEXTS, **{f"{ending}.gz": kind for ending, kind in _TEXTS.items()},
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""Endings of files, each with its name in the library `datasets`."""
ENDINGS = tuple(_KINDS)
_LONGEST_FIELD = 1 << 27  # letters of a value of CSV; Python's limit is 131,072


def kind_of(path: Path) -> str:
    """Return how a file is read, by its ending in any case: "json", "csv", "parquet" or "arrow".

    Return "" for another ending. The file need not exist. .jsonl and .ndjson are "json", .tsv is "csv";
    these may end in .gz too.
    """
    return _KINDS.get(_ending(path), "")


def _ending(path: Path) -> str:
    """Return the ending of a file's name in small letters: ".csv", ".csv.gz", "" for none."""
    last = "".join(path.suffixes[-2:]) if path.suffix.lower() == ".gz" else path.suffix
    return last.lower()


def matching_files(path: Path) -> list[Path]:
    """Return [path] if `path` is a file, else the files that match it as a pattern, sorted by name.

    A pattern is for example parts/*.jsonl; `**` matches folders of any depth. Folders are left out.
    Raise DataError if there is no file.
    """
    names = [str(path)] if os.path.exists(path) else sorted(glob.glob(str(path), recursive=True))
    found = [Path(name) for name in names if Path(name).is_file()]
    if not found:
        problem = "no file matches this" if glob.has_magic(str(path)) else "no such file is there"
        remedy = "Correct LEARNER_DATASET or LEARNER_EVAL_DATASET, or copy the file there."
        seen = f"(seen from {Path.cwd()}), expected a file of rows"
        raise DataError(f"{path}: {problem} {seen}. {remedy}")
    return found


def form_of(paths: Sequence[Path]) -> str:
    """Return how these files are read: "text" if all are JSON or CSV, else "parquet" or "arrow".

    `paths` has at least one. Only the endings of their names count: no file is opened. Raise DataError
    for a file of another ending, and if the files are of several forms.
    """
    for path in paths:
        if not kind_of(path):
            expected = f"expected a file that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
            raise DataError(f"{path}: {expected}: rename or convert the file")
    forms = {"text" if kind_of(path) in ("json", "csv") else kind_of(path): path for path in paths}
    if len(forms) > 1:
        found = ", ".join(map(str, forms.values()))
        remedy = "name each form as a data set of its own in LEARNER_DATASET, such as parts/*.parquet"
        raise DataError(f"{found}: files of several forms, expected one form in a data set: {remedy}")
    return next(iter(forms))


def read_files(paths: Sequence[Path], name: str) -> Rows:
    """Return the rows of all files, in the order of the files. Log the progress for JSON and CSV.

    `name` is the data set's, for log lines. A row of JSON or CSV that lacks columns of other rows gets
    None there; the number of these rows is logged. Other values of theirs are as they stand in the file:
    an array of Arrow would make of 5 and 2.5 5.0 and 2.5, and take no text beside numbers. Raise
    DataError for files of another or several kinds, for a column that is there twice, and for JSON or
    CSV that is unreadable or has no row in a file. Damaged Parquet and Arrow files raise the errors of
    pyarrow or of the library datasets.
    """
    form = form_of(paths)
    if form == "text":
        texts = (row for path in paths for row in text_rows(path))
        return _filled(list(with_progress(texts, f"{name}: lines read")), name)
    import datasets

    check_names_once(paths, form)
    read = datasets.Dataset.from_parquet if form == "parquet" else _read_arrow
    names = [glob.escape(str(path)) if form == "parquet" else str(path) for path in paths]  # no patterns
    return datasets.concatenate_datasets([read(name) for name in names])


def _filled(rows: list[dict[str, object]], name: str) -> list[dict[str, object]]:
    """Return the rows, each with the columns of all rows; a column that a row lacked is None there.

    Log how many rows of the data set `name` lacked columns. If none did, return `rows` itself.
    """
    columns = dict.fromkeys(column for row in rows for column in row)
    lacking = sum(len(row) < len(columns) for row in rows)
    if lacking:
        log.info(f"{name}: {lacking} of {len(rows)} rows lack columns of others, which are null there.")
    return [{**columns, **row} for row in rows] if lacking else rows


def _read_arrow(path: str) -> "Dataset":
    """Return all rows of a file in Arrow's file or stream format, held in memory.

    Raise pyarrow.ArrowException for a file of another format, OSError if it cannot be read.
    """
    import datasets

    return datasets.Dataset(datasets.table.InMemoryTable(_open_arrow(path).read_all()))


def _open_arrow(path: str) -> Any:
    """Return pyarrow's reader of a file in Arrow's file format or, if it is none, stream format.

    Raise pyarrow.ArrowException for a file of another format, OSError if it cannot be read.
    """
    import pyarrow

    try:
        return pyarrow.ipc.open_file(path)
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_stream(path)


def check_names_once(paths: Sequence[Path], form: str) -> None:
    """Raise DataError if a column's name is there twice in one of the files; their rows are not read.

    `form` is "parquet" or "arrow", for all files. Raise pyarrow's errors for a damaged file.
    """
    import pyarrow.parquet

    for path in paths:
        parquet = form == "parquet"
        schema = pyarrow.parquet.read_schema(path) if parquet else _open_arrow(str(path)).schema
        _refuse_repeated(schema.names, str(path))


def _refuse_repeated(names: Sequence[str], where: str) -> None:
    """Raise DataError, which begins with `where`, if a column's name is more than once in `names`."""
    if repeated := [short(name) for name, count in Counter(names).items() if count > 1]:
        expected = "expected each name once: rename one of the columns"
        raise DataError(f"{where}: the column {', '.join(repeated)} is there twice, {expected}")


def stream_texts(paths: Sequence[Path], columns: Mapping[str, None]) -> Iterator[dict[str, object]]:
    """Yield the rows of JSON and CSV files one by one, file after file.

    A row that lacks a key of `columns` gets None there. Raise DataError for a file without rows, or that
    is not readable as its ending says.
    """
    for path in paths:
        for row in text_rows(path):
            yield {**columns, **row}


def text_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a JSON or CSV file one by one, each as a dictionary by column.

    CSV is what ends in .csv or .tsv (also with .gz), JSON any other file. Raise DataError if the file
    has no row, or is not readable as its ending says.
    """
    empty = True
    for row in _table_rows(path) if kind_of(path) == "csv" else _json_rows(path):
        empty = False
        yield row
    if empty:
        remedy = "write rows to it, or name another file in LEARNER_DATASET or LEARNER_EVAL_DATASET"
        raise DataError(f"{path} is empty, expected at least one row: {remedy}")


def _table_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a CSV file, every value as text: `01` stays `01`. See `_separator`.

    The first line has the names of the columns, and is no row. Blank lines are skipped. A file without
    rows yields nothing. Raise DataError if the file is no CSV or not UTF-8, if a column has no name or
    another one's, or if a row, which the error names, has too few or too many values.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    lines = (line for _, line in _lines(path))
    separator = _separator(next((line for _, line in _lines(path)), ""), _ending(path))
    reader = csv.DictReader(lines, restkey="", strict=True, delimiter=separator)
    try:
        names = reader.fieldnames or ()
        if "" in names:
            expected = "expected a name for each: name it, or leave it out (in pandas index=False)"
            raise DataError(f"{path}, line 1: a column has no name, {expected}")
        _refuse_repeated(names, f"{path}, line 1")
        for number, row in enumerate(reader, 1):
            if "" in row or None in row.values():
                found = f"too few or too many values, expected {len(names)}, as in the first line"
                remedy = f"Fill in a missing value, or quote one that has a {separator!r}"
                raise DataError(f"{path}, row {number} after the header: {found}. {remedy}")
            yield row
    except csv.Error as error:
        line = f"{path}, line {reader.reader.line_num}"  # reader.line_num is the row's before
        raise DataError(f"{line}: not readable as CSV: {error}. Correct the line's quotes") from error


def _separator(header: str, ending: str) -> str:
    """Return what separates the values of a CSV file with this first line: comma, semicolon or tab.

    The first of these that is there outside of quotes does; in a .tsv file the tab is the first.
    """
    bare, order = re.sub('"[^"]*"', "", header), "\t,;" if ".tsv" in ending else ",;\t"
    return next(filter(bare.__contains__, order), order[0])


def _json_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of a file of JSON lines, or of one JSON list. Empty lines are skipped.

    A row that is a list of turns becomes {"conversations": turns}, as in ShareGPT's files. Raise
    DataError if a line or item, which the error names, is not readable as JSON, is no object, or shares
    no column with the rows before it. Raise DataError if the rows have over 1024 columns together.
    """
    columns: dict[str, None] | None = None
    for place, found in _objects(path):
        where = f"{path}, {place}"
        row = {"conversations": found} if _is_conversation(found) else found
        if not isinstance(row, dict):
            remedy = "Write the row as {column: value, ...}, or remove it"
            raise DataError(f"{where}: expected an object, found {brief(row)}. {remedy}")
        columns = dict.fromkeys(row) if columns is None else columns
        if columns and columns.keys().isdisjoint(row):
            there, known = short(", ".join(row), 100), short(", ".join(columns), 100)
            raise DataError(
                f"{where}: has {there or 'nothing'}, and none of the columns before, {known}; expected "
                "at least one of these: give all rows the same columns"
            )
        columns.update(dict.fromkeys(row))
        if len(columns) > MOST_NAMES:
            problem = f"the rows up to here have {len(columns)} columns together"
            remedy = "Give the same things the same names in all rows"
            raise DataError(f"{where}: {problem}; expected at most {MOST_NAMES}. {remedy}")
        yield row


def _is_conversation(row: object) -> bool:
    """Return whether a row is a list of at least one turn: maps with a key "from" or "role".

    Open-Reasoner-Zero's file has such rows.
    """
    return (
        isinstance(row, list)
        and bool(row)
        and all(isinstance(turn, dict) and ("from" in turn or "role" in turn) for turn in row)
    )


def _objects(path: Path) -> Iterator[tuple[str, object]]:
    """Yield pairs of a place and a value: each line's, or each item's of the file's one list.

    A place is "line 3" or "item 3", counted from 1. A file that ends in .json or .json.gz holds one list
    if its text begins with "[". Blank lines are counted but skipped. Raise DataError if a line or the
    list is not readable as JSON, has a key twice in an object, or is nested too deep, and if the file is
    not UTF-8.
    """
    may_be_list = _ending(path) in (".json", ".json.gz")
    lines = _lines(path)
    first = next((line for _, line in _lines(path) if line.strip()), "")
    if may_be_list and first.lstrip()[:1] == "[":
        for number, item in enumerate(_parse("".join(line for _, line in lines), f"{path}"), 1):
            yield f"item {number}", item
        return
    form = "one object per line" + (", or one list of objects" * may_be_list)
    for number, line in lines:
        if line.strip():
            place = f"line {number}"
            yield place, _parse(line, f"{path}, {place}", f": {brief(line)}. Expected {form}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line, with its line end, without a byte-order mark.

    A file that ends in .gz is decompressed. Raise DataError if a line is not UTF-8, OSError, EOFError or
    zlib.error if the file cannot be read or decompressed.
    """
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
    """Return the value of a JSON text. Raise DataError for a text that is not readable as JSON.

    The error begins with `where`; `more` follows the cause. A key twice in an object, nesting over 40
    levels, integers over 64 bits, and half a character count as not readable too.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{where}: not readable as JSON ({explain(error)}){more}. Correct the file there"
        ) from error
