"""Rows of a data set: files, a saved folder, or a hub id.

questions.jsonl                       a file, see learner/data/files.py
parts/*.parquet                       all files of this pattern, by name
openai/gsm8k:main@e53f048#500         hub id, its configuration and revision; 500 rows of this data set
"""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.common.errors import DataError
from penstock.common.text import short
from penstock.learner.data.files import ENDINGS, kind_of, matching_files, read_file, separator_of

if TYPE_CHECKING:
    from datasets import Dataset

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
    if not path.is_dir():
        parts = [read_file(part) for part in matching_files(path)]
        return datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
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
    import datasets

    path = source.path
    files = [] if path is None or path.is_dir() else [str(file) for file in matching_files(path)]
    if path is not None and not (files and kind_of(path)):
        expected = f"expected a hub id or an existing file that ends in {', '.join(ENDINGS)}"
        raise DataError(f"{source.name}: {expected}. Correct it, or LEARNER_DATASET_STREAMING=false")

    with _as_data_error(source, split):
        if path is not None:
            kind = kind_of(path)
            options = {"sep": separator_of(path)} if kind == "csv" else {}
            rows = datasets.load_dataset(
                kind, data_files=files, split="train", streaming=True, **options
            )
        else:
            rows = datasets.load_dataset(
                source.name, source.config, revision=source.revision, split=split, streaming=True
            )
        if seed is not None:
            rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        yield from rows.take(source.count) if source.count else rows
