"""Rows of a data set: files, a saved folder, or a hub id.

questions.jsonl                       a file, see learner/data/files.py
parts/*.parquet                       all files of this pattern, by name
openai/gsm8k:main@e53f048#500         hub id, its configuration and revision; 500 rows of this data set
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common.errors import DataError
from penstock.common.files.disk import failure_of
from penstock.common.text import short
from penstock.common.transfer.hub import outage_of
from penstock.learner.data.files import (
    ENDINGS,
    Rows,
    check_names_once,
    form_of,
    kind_of,
    matching_files,
    read_files,
    stream_texts,
    text_rows,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_HUB = re.compile(r"(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<revision>[^:@#]+))?")
_SHUFFLE_BUFFER = 10_000
"""Rows of a stream in memory; the next row is drawn from these at random."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set of LEARNER_DATASET. `name` is a file, pattern, folder or hub id; `count` 0 is all."""

    name: str
    config: str | None = None
    revision: str | None = None
    count: int = 0

    @property
    def path(self) -> Path | None:
        """The path of the file, pattern or folder that `name` is; None if `name` is a hub id.

        A name is a path if it has a known ending such as .jsonl, if a file or folder of this name is
        there, or if it has a wildcard such as *.
        """
        path = Path(self.name)
        return path if kind_of(path) or os.path.exists(path) or has_magic(self.name) else None

    @classmethod
    def parse(cls, text: str) -> "Source":
        """Return the source that NAME[:CONFIG][@REVISION][#COUNT] names, as in LEARNER_DATASET.

        Only a hub id can have CONFIG and REVISION (else None). Without COUNT the source's count is 0.
        Raise DataError for a COUNT that is no number above 0, or a NAME that is neither path nor hub id.
        """
        name, marker, count = text.rpartition("#") if "#" in text else (text, "", "0")
        if marker and not (count.isdecimal() and int(count)):
            raise DataError(
                f"{text}: expected a number of rows after #, found {count!r}. Write one above 0 in "
                "LEARNER_DATASET or LEARNER_EVAL_DATASET, or leave the # out there"
            )
        rows = int(count)
        if cls(name).path:
            return cls(name, count=rows)
        found = _HUB.fullmatch(name)
        if not found:
            problem = "no such file or folder is there, and this is no ID[:CONFIG][@REVISION][#ROWS]"
            raise DataError(f"{text}: {problem}. Correct LEARNER_DATASET or LEARNER_EVAL_DATASET")
        return cls(found["name"], found["config"], found["revision"], rows)


def load_rows(source: Source, split: str, seed: int) -> tuple[Rows, list[int]]:
    """Return the rows of a data set, and the number of each row in it, from 1 on.

    If the source has a count below the number of rows, that many rows are drawn by `seed`; they keep
    their order. A hub id is downloaded. `split` names the part of a hub id or saved folder; files have
    none. Progress bars are switched off. Raise DataError for unreadable rows, images, sounds and videos.
    """
    import datasets

    datasets.disable_progress_bars()
    with _as_data_error(source, split):
        rows = _load(source, split)
        if not isinstance(rows, list):
            _check_values(rows, source.name)
    if source.count and source.count < len(rows):
        chosen = np.random.default_rng([seed, len(rows)]).permutation(len(rows))[: source.count]
        drawn = sorted(chosen.tolist())
        few = [rows[place] for place in drawn] if isinstance(rows, list) else rows.select(drawn)
        return few, [position + 1 for position in drawn]
    return rows, list(range(1, len(rows) + 1))


def _check_values(rows: "Dataset", name: str) -> None:
    """Raise DataError, which begins with `name`, for a column of images, sounds or videos, or damage.

    `name` is the data set's. A text of a Parquet or Arrow file that is not UTF-8 is damage, and a date,
    timestamp or duration that Python has no value for.
    """
    import pyarrow

    _refuse_media(rows.features, name)
    for column in rows.column_names:
        data = rows.data.column(column)
        dates = data if re.search("date|timestamp|duration", str(data.type)) else ()
        try:
            data.validate(full=True)
            for date in dates:
                date.as_py()
        except (pyarrow.ArrowInvalid, OverflowError) as error:
            found = f"the column {short(column)} has damaged values: {short(error)}"
            remedy = "Write the file again, with texts in UTF-8 and dates in the years 1 to 9999"
            raise DataError(f"{name}: {found}. {remedy}") from error


def _refuse_media(features: Mapping[str, Any] | None, name: str) -> None:
    """Raise DataError, which begins with `name`, for a column of images, sounds, videos or PDFs.

    `features` has the type of each column, as the library datasets knows it; None: types not known,
    nothing is refused.
    """
    for column, feature in (features or {}).items():
        if found := _media_of(feature):
            raise DataError(
                f"{name}: the column {short(column)} holds values of type {found}, expected plain data: "
                "the policy sees only texts. Choose a data set of texts, or remove the column if no "
                "question needs it"
            )


def _media_of(feature: Any) -> str:
    """Return "Image", "Audio", "Video" or "Pdf" if a column holds such values, also nested; else "".

    `feature` is the column's type in the library datasets. Of several kinds the first is returned.
    """
    if type(feature).__name__ in ("Image", "Audio", "Video", "Pdf"):
        return type(feature).__name__
    parts = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    return next(filter(None, (_media_of(part) for part in parts if part is not None)), "")


def _load(source: Source, split: str) -> Rows:
    """Return all rows of files, a folder, or a hub id, which is downloaded.

    `split` names the part of a folder or hub id; files, and folders saved without splits, have none.
    Raise ValueError for a split that is not there, DataError for bad files and for a folder of JSON or
    CSV, else the libraries' errors.
    """
    import datasets

    path = source.path
    if path is None:
        return datasets.load_dataset(source.name, source.config, revision=source.revision, split=split)
    if not os.path.isdir(path):
        return read_files(matching_files(path), source.name)
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        if (kind := datasets.load_dataset_builder(str(path)).name) in ("csv", "json"):
            problem = "a folder of such files is read with guessed types, which make 7 of 007"
            remedy = f"Name the files, such as {source.name}/*.{kind}*, which keeps their values"
            raise DataError(f"{source.name}: {kind}: {problem}; expected Parquet. {remedy}")
        return datasets.load_dataset(str(path), split=split)
    saved = datasets.load_from_disk(str(path))  # a data set, or a dictionary of splits
    if isinstance(saved, dict) and split not in saved:
        remedy = "choose one by LEARNER_DATASET_SPLIT or LEARNER_EVAL_SPLIT"
        raise ValueError(f"no split {split} is there, expected one of {', '.join(saved)}: {remedy}")
    return saved[split] if isinstance(saved, dict) else saved


@contextmanager
def _as_data_error(source: Source, split: str) -> Iterator[None]:
    """Raise DataError, which names source and split, in place of an error of the block's libraries.

    These are the errors of datasets, pyarrow, zlib and the hub, OSError, ValueError, RecursionError,
    OverflowError and EOFError. Raise DiskFailed for a broken disk, ServerUnavailable if the hub is away.
    Other errors of the block, DataError among them, pass through.
    """
    import datasets
    import pyarrow
    from huggingface_hub.errors import HTTPError

    asked = f"{source.name} (split {split})"
    try:
        yield
    except (
        datasets.exceptions.DatasetsError, pyarrow.ArrowException, HTTPError, OSError, ValueError,
        RecursionError, OverflowError, EOFError, zlib.error,
    ) as error:  # fmt: skip
        if failed := failure_of(error.__cause__ or error):
            raise failed from error
        if source.path is None and (outage := outage_of(error, asked)):
            raise outage from error
        raise DataError(
            f"{asked}: cannot be loaded: {short(error, 500)}. Correct LEARNER_DATASET or "
            "LEARNER_DATASET_SPLIT (for evaluation LEARNER_EVAL_DATASET or LEARNER_EVAL_SPLIT)."
        ) from error


def stream_rows(source: Source, split: str, seed: int | None) -> Iterator[dict[str, object]]:
    """Yield the rows of a data set one by one, each by column, without keeping all in memory or on disk.

    With `seed`, the rows are shuffled in a buffer of 10,000; None keeps their order. If the source has a
    count, only so many first rows of this order come. `split` names the part of a hub id; files have
    none. Raise DataError for a folder, for rows that cannot be read, and for a column of images, sounds
    or videos.
    """
    with _as_data_error(source, split):
        rows = _open_stream(source, split)
        _refuse_media(rows.features, source.name)
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        yield from rows.take(source.count) if source.count else rows


def _open_stream(source: Source, split: str) -> "IterableDataset":
    """Return the rows of a data set, which are read one by one when they are asked for.

    `split` names the part of a hub id. Files of JSON and CSV get the columns of the first row in each
    row. Raise DataError for a folder, for no file, for files of unknown or several forms, for a first
    text file without a readable row, and for a column that is there twice. Raise errors of the library
    datasets, pyarrow's and OSError for a hub id or file that cannot be read.
    """
    import datasets

    path = source.path
    if path is None:
        return datasets.load_dataset(
            source.name, source.config, revision=source.revision, split=split, streaming=True
        )
    if os.path.isdir(path):
        expected = f"expected a hub id, or files that end in {', '.join(ENDINGS)}"
        raise DataError(
            f"{source.name}: a folder cannot be streamed: {expected}. Correct the name, or set "
            "LEARNER_DATASET_STREAMING=false"
        )
    files = matching_files(path)
    form = form_of(files)
    if form == "text":
        columns = dict.fromkeys(next(text_rows(files[0])))
        return datasets.IterableDataset.from_generator(
            stream_texts, gen_kwargs={"paths": files, "columns": columns}
        )
    check_names_once(files, form)
    names = [escape(str(file)) for file in files]  # which datasets takes for patterns
    return datasets.load_dataset(form, data_files=names, split="train", streaming=True)
