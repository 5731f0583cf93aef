"""Rows of a data set: files, a saved folder, or a hub id.

questions.jsonl                       a file, see learner/data/files.py
parts/*.parquet                       all files of this pattern, by name
openai/gsm8k:main@e53f048#500         hub id, its configuration and revision; 500 rows of this data set
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.common.errors import DataError
from penstock.common.text import short
from penstock.learner.data.files import (
    ENDINGS,
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
        """The path that `name` is, with a known ending or a file or folder there; None for a hub id."""
        path = Path(self.name)
        return path if kind_of(path) or path.exists() or has_magic(self.name) else None

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


def load_rows(source: Source, split: str, seed: int) -> tuple["Dataset", list[int]]:
    """Return the rows of a data set and their numbers in it, from 1.

    If the source has a count, that many rows are drawn by the seed. A hub id is downloaded. Raise
    DataError if the rows cannot be read, or hold images.
    """
    import datasets

    datasets.disable_progress_bars()
    with _as_data_error(source, split):
        rows = _load(source, split)
        _check_values(rows, source.name)
    if source.count and source.count < len(rows):
        chosen = np.random.default_rng([seed, len(rows)]).permutation(len(rows))[: source.count]
        drawn = sorted(chosen.tolist())
        return rows.select(drawn), [position + 1 for position in drawn]
    return rows, list(range(1, len(rows) + 1))


def _check_values(rows: "Dataset", name: str) -> None:
    """Raise DataError, which begins with `name`, for a column of images, or with damaged values.

    A text of a Parquet or Arrow file that is not UTF-8 is a damaged value.
    """
    import pyarrow

    _refuse_media(rows.features, name)
    for column in rows.column_names:
        try:
            rows.data.column(column).validate(full=True)
        except pyarrow.ArrowInvalid as error:
            raise DataError(
                f"{name}: the column {short(column)} has damaged values: {short(error)}. Write the file "
                "again, with texts in UTF-8"
            ) from error


def _refuse_media(features: Mapping[str, Any] | None, name: str) -> None:
    """Raise DataError, which begins with `name`, for a column of images, sounds or films."""
    for column, feature in (features or {}).items():
        if found := _media_of(feature):
            raise DataError(
                f"{name}: the column {short(column)} holds values of type {found}, which the policy "
                "cannot see. Choose a data set of texts, or remove the column if no question needs it"
            )


def _media_of(feature: Any) -> str:
    """Return the kind of a column's images, sounds or films, such as "Image"; "" if it has none."""
    if type(feature).__name__ in ("Image", "Audio", "Video", "Pdf"):
        return type(feature).__name__
    parts = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    return next(filter(None, (_media_of(part) for part in parts if part is not None)), "")


def _load(source: Source, split: str) -> "Dataset":
    """Return all rows of a data set. Raise DataError, ValueError, OSError or the libraries' errors."""
    import datasets

    path = source.path
    if path is None:
        return datasets.load_dataset(source.name, source.config, revision=source.revision, split=split)
    if not path.is_dir():
        return read_files(matching_files(path), source.name)
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return datasets.load_dataset(str(path), split=split)
    saved = datasets.load_from_disk(str(path))  # a data set, or a dictionary of splits
    if isinstance(saved, dict) and split not in saved:
        raise ValueError(f"no split {split} is there, expected one of {', '.join(saved)}")
    return saved[split] if isinstance(saved, dict) else saved


@contextmanager
def _as_data_error(source: Source, split: str) -> Iterator[None]:
    """Raise DataError, naming source and split, for errors of the block's libraries and files."""
    import datasets
    import pyarrow

    try:
        yield
    except (
        datasets.exceptions.DatasetsError, pyarrow.ArrowException, OSError, ValueError, RecursionError,
        EOFError, zlib.error,
    ) as error:  # fmt: skip
        raise DataError(
            f"{source.name} (split {split}): cannot be loaded: {short(error, 500)}. "
            "Correct LEARNER_DATASET or LEARNER_DATASET_SPLIT (for evaluation LEARNER_EVAL_DATASET or "
            "LEARNER_EVAL_SPLIT)."
        ) from error


def stream_rows(source: Source, split: str, seed: int | None) -> Iterator[dict[str, object]]:
    """Yield the rows of a data set without keeping all of them in memory or on disk.

    With a seed, the rows are shuffled in a buffer of 10,000. Raise DataError if they cannot be read.
    """
    with _as_data_error(source, split):
        rows = _open_stream(source, split)
        _refuse_media(rows.features, source.name)
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        yield from rows.take(source.count) if source.count else rows


def _open_stream(source: Source, split: str) -> "IterableDataset":
    """Return the rows of a data set, to be read one by one. Raise DataError as `load_rows` does."""
    import datasets

    path = source.path
    if path is None:
        return datasets.load_dataset(
            source.name, source.config, revision=source.revision, split=split, streaming=True
        )
    if path.is_dir():
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
    names = list(map(str, files))
    return datasets.load_dataset(form, data_files=names, split="train", streaming=True)
