"""What a run leaves to read: metrics.jsonl by TRL's names, completions/, evaluations.jsonl."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from penstock.common.files.atomic import append_whole, read_json_lines
from penstock.common.files.run_folder import LearnerFolder
from penstock.learner.report.completions import to_parquet
from penstock.learner.report.trackers import start_trackers
from penstock.learner.streams.evaluation import Evaluated


class Recorder:
    """Writes the run's files for people. Every write raises RunTaken or DiskFull, see LearnerFolder."""

    def __init__(self, folder: LearnerFolder, report_to: Sequence[str], run: str) -> None:
        self._folder = folder
        self._trackers = start_trackers(report_to, folder.path, run)

    def cut_after(self, step: int) -> None:
        """Drop what a learner that resumes at `step` will write again, and evaluations that are torn."""
        rows = [row for row in read_json_lines(self._folder.metrics) if row["step"] <= step]
        self._rewrite(self._folder.metrics, rows)
        self._rewrite(self._folder.evaluations, self._whole_evaluations())

    def _rewrite(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        data = "".join(_line(row) for row in rows).encode()
        self._folder.write_file(path.name, path, data)

    def evaluated_steps(self) -> set[int]:
        """Steps whose version was evaluated, all its answers on disk."""
        return {row["step"] for row in self._whole_evaluations()}

    def _whole_evaluations(self) -> list[dict[str, Any]]:
        rows = read_json_lines(self._folder.evaluations)
        counts = Counter((row["step"], row["version"]) for row in rows)
        return [row for row in rows if counts[row["step"], row["version"]] == row["questions"]]

    def metrics(self, step: int, metrics: dict[str, Any], track: bool = True) -> None:
        """One line per step; trackers have those that are retrained already."""
        self._append(self._folder.metrics, {"step": step} | metrics | {"step": step})
        for tracker in self._trackers if track else ():
            tracker.log(metrics, step)

    def completions(self, step: int, rows: Sequence[dict[str, Any]], track: bool = True) -> None:
        """A file per step (learner/report/completions.py); trackers have what is retrained."""
        path = self._folder.completion_table(step)
        self._folder.write_file("completions", path, to_parquet(rows))
        for tracker in self._trackers if track else ():
            tracker.log_completions(rows, step)

    def evaluation(
        self, result: Evaluated, columns: Sequence[dict[str, Any]], metrics: dict[str, float]
    ) -> None:
        """One line per held-out question, with its answers; trackers get the metrics."""
        head = {
            "step": result.version.step,
            "version": str(result.version),
            "questions": len(result.answers),
        }
        rows = [head | asdict(answer) | {"columns": columns[answer.index]} for answer in result.answers]
        self._append(self._folder.evaluations, *rows)
        for tracker in self._trackers:
            tracker.log(metrics, result.version.step)

    def results(self, name: Literal["train", "eval"], metrics: dict[str, Any]) -> None:
        """The final figures, as NAME_results.json: train, eval."""
        path = self._folder.results(name)
        data = json.dumps(metrics, indent=2, default=str).encode()
        self._folder.write_file(path.name, path, data)

    def close(self) -> None:
        """End the trackers' run."""
        for tracker in self._trackers:
            tracker.close()

    def _append(self, path: Path, *rows: dict[str, Any]) -> None:
        data = "".join(_line(row) for row in rows).encode()
        with path.open("ab", buffering=0) as file:
            write = partial(append_whole, file, data, file.seek(0, os.SEEK_END), sync=False)
            self._folder.write(path.name, path, write, len(data))


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
