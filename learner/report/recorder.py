"""Writes the files of a run that people read: metrics.jsonl, completions/, evaluations.jsonl."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby, repeat
from pathlib import Path
from typing import Any, Literal

from penstock.common.files.atomic import append_whole, read_row
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.files.tail import lines_from_end
from penstock.common.log import get_logger
from penstock.learner.report.completions import to_parquet
from penstock.learner.report.trackers import Trackers
from penstock.learner.streams.evaluation import Evaluated

Row = dict[str, Any]

log = get_logger(__name__)


class Recorder:
    """Writes the run's metrics, completions and evaluations to `folder`, and sends them to trackers.

    A write waits for room on a full disk. It raises DiskFull if none comes, RunTaken if a later learner
    has claimed the folder. Creating a Recorder starts the trackers that `report_to` names, as in
    LEARNER_REPORT_TO, for the run called `run`, and sends them its `settings` by name. Raise ConfigError
    if one is not found or does not start.
    """

    def __init__(
        self, folder: LearnerFolder, report_to: Sequence[str], run: str, settings: Row | None = None
    ) -> None:
        self._folder = folder
        self._trackers = Trackers(report_to, folder.path, run, settings)
        self._evaluated: set[int] = set()

    def cut_after(self, step: int) -> None:
        """Delete metrics of steps after `step`, and the rows of an evaluation that a kill cut off.

        Both are at the end of metrics.jsonl and evaluations.jsonl, and no more of these is read. Damaged
        rows at the end are deleted too. Whole evaluations of later steps stay. Raise RunTaken, DiskFull.
        """
        folder = self._folder
        self._cut(folder.metrics, _end_of_metrics(folder.metrics, step))
        end, self._evaluated = _end_of_evaluations(folder.evaluations, step)
        self._cut(folder.evaluations, end)

    def _cut(self, path: Path, end: int) -> None:
        """Make the file at `path` `end` bytes long, or new. Raise RunTaken, DiskFull."""

        def cut() -> None:
            """Cut the file, which is made if missing. Raise OSError."""
            with path.open("ab") as file:
                if cut_off := file.tell() - end:
                    log.info(f"{path.name}: {cut_off} bytes after the resumed step are written again.")
                file.truncate(end)

        self._folder.write(path.name, path, cut, 0)

    def evaluated_steps(self) -> set[int]:
        """Return the steps whose evaluation is whole in evaluations.jsonl: as many rows as questions.

        Those before the step of `cut_after` are left out.
        """
        return self._evaluated

    def metrics(self, step: int, metrics: Row, track: bool = True) -> None:
        """Append the metrics of `step`, by name, to metrics.jsonl; with `track` send them to trackers.

        The field `step` of the row is always `step`. A tracker's first failure is logged, none is
        raised. Raise RunTaken, DiskFull.
        """
        self._append(self._folder.metrics, [{"step": step} | metrics | {"step": step}])
        if track:
            self._trackers.tell(lambda tracker: tracker.log(metrics, step))

    def completions(self, step: int, make_rows: Callable[[], list[Row]], track: bool = True) -> None:
        """Write the rows (column to value) that `make_rows` returns as the step's Parquet file.

        See `make_table` and `write_table`. Raise RunTaken, DiskFull.
        """
        self.write_table(step, self.make_table(step, make_rows), track)

    def make_table(self, step: int, make_rows: Callable[[], list[Row]]) -> tuple[list[Row], bytes]:
        """Return the rows that `make_rows` returns, and their Parquet file; both are empty without rows.

        If they cannot be made, log the error and return both empty: the step is in the journal, and an
        error would end every resume. Nothing is written, so that a thread may call this.
        """
        try:
            rows = make_rows()
            return rows, to_parquet(rows) if rows else b""
        except Exception:  # pyarrow's, or of values that no check of a message foresaw
            path = str(self._folder.completion_table(step))
            log.exception("A table of completions was not written.", file=path)
            return [], b""

    def write_table(self, step: int, table: tuple[list[Row], bytes], track: bool = True) -> None:
        """Write the step's table, of `make_table`; with `track` send its rows to the trackers.

        A table of this step is replaced. Without rows do nothing. Raise RunTaken, DiskFull.
        """
        rows, data = table
        if rows:
            self._folder.write_file(self._folder.completion_table(step), data)
        if rows and track:
            self._trackers.tell(lambda tracker: tracker.log_completions(rows, step))

    def evaluation(
        self, result: Evaluated, columns: Sequence[Row], metrics: dict[str, float],
        right: Sequence[Sequence[bool | None]] = (),
    ) -> None:  # fmt: skip
        """Append each answer of `result`, an evaluation that ended, to evaluations.jsonl as a row.

        A row has step, version, number of questions, the answer, and its question's columns of the data
        set, from `columns` by the question's index. Of `right`, in the order of the answers, it has
        whether each completion is right, None if that is not known. Send `metrics`, by name, to the
        trackers. Raise RunTaken, DiskFull.
        """
        step, version = result.version.step, str(result.version)
        head = {"step": step, "version": version, "questions": len(result.answers)}
        rows = [
            head | asdict(answer) | {"right": verdicts, "columns": columns[answer.index]}
            for answer, verdicts in zip(result.answers, right or repeat([]), strict=False)
        ]
        self._append(self._folder.evaluations, rows)
        self._evaluated.add(step)
        self._trackers.tell(lambda tracker: tracker.log(metrics, step))

    def results(self, name: Literal["train", "eval"], metrics: Row) -> None:
        """Write train_results.json or eval_results.json, by `name`, with `metrics` as JSON.

        A file that is there is replaced. Values that JSON has no type for become text. Raise RunTaken,
        DiskFull.
        """
        data = json.dumps(metrics, indent=2, default=str).encode()
        self._folder.write_file(self._folder.results(name), data)

    def close(self) -> None:
        """Close the trackers. A tracker's failure is logged if it is its first, and not raised."""
        self._trackers.tell(lambda tracker: tracker.close())

    def _append(self, path: Path, rows: Sequence[Row]) -> None:
        """Append `rows` as JSON lines to the file at `path`, which is made if missing.

        Nothing is synced to disk: the journal holds the same. A failed append is cut off again, and a
        full disk is waited for. Raise RunTaken, DiskFull, OSError for other failures.
        """
        data = _to_lines(rows)

        def append() -> None:
            """Append the rows. Raise OSError, with nothing appended; opening may need room as well."""
            with path.open("ab", buffering=0) as file:
                append_whole(file, data, file.seek(0, os.SEEK_END), sync=False)

        self._folder.write(path.name, path, append, len(data))


def _end_of_metrics(path: Path, step: int) -> int:
    """Return where the rows of steps after `step` begin, which are the last ones of metrics.jsonl."""
    end = path.stat().st_size if path.is_file() else 0
    for start, line in lines_from_end(path):
        row = read_row(line)
        if row is not None and row["step"] <= step:
            break
        end = start
    return end


def _end_of_evaluations(path: Path, step: int) -> tuple[int, set[int]]:
    """Return where the whole evaluations of evaluations.jsonl end, and their steps from `step` on.

    What follows is one that a kill cut off, or damage. A whole evaluation has as many rows as questions.
    """
    end = path.stat().st_size if path.is_file() else 0
    whole: set[int] = set()
    lines = ((start, read_row(line, version=str, questions=int)) for start, line in lines_from_end(path))
    for key, rows in groupby(lines, key=lambda line: line[1] and _evaluation_of(line[1])):
        if whole and key and key[0] < step:
            break
        starts = [start for start, _ in rows]
        if key and len(starts) == key[2]:
            whole.add(key[0])
        elif not whole:
            end = starts[-1]
    return end, {found for found in whole if found >= step}


def _evaluation_of(row: Row) -> tuple[int, str, int]:
    """Return step, version and number of questions of a row of evaluations.jsonl."""
    return row["step"], row["version"], row["questions"]


def _to_lines(rows: Sequence[Row]) -> bytes:
    """Return each row as a line of JSON in UTF-8. Values that JSON has no type for become text."""
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows).encode()
