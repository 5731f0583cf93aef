"""What a run leaves to read: metrics.jsonl by TRL's names, completions/, evaluations.jsonl."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.common.files.atomic import append_whole, read_json_lines, write_whole
from penstock.common.files.disk import Disk
from penstock.common.log import get_logger
from penstock.common.reward_totals import total_rewards
from penstock.common.wire.messages import ScoredGroup
from penstock.learner.policy.update import TokenRecord, Update
from penstock.learner.report.completions import completions_path, to_parquet
from penstock.learner.report.trackers import start_trackers
from penstock.learner.streams.evaluation import Evaluated
from penstock.learner.streams.intake import Arrivals

log = get_logger(__name__)


def update_metrics(update: Update) -> dict[str, Any]:
    """Metrics of an Update, over its trained tokens."""
    tokens = update.tokens
    metrics = {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        "num_tokens": len(tokens.ratio),
        "optimizer_steps": update.optimizer_steps,
        "optimizer_steps/skipped": update.skipped,
    }
    if len(tokens.ratio) == 0:
        return metrics
    low, high = tokens.clipped_low.mean(), tokens.clipped_high.mean()
    return metrics | {
        "entropy": float(tokens.entropy.mean()),
        "kl": float(tokens.kl.mean()),
        "clip_ratio/low_mean": float(low),
        "clip_ratio/high_mean": float(high),
        "clip_ratio/region_mean": float(low + high),
        "sampling/importance_sampling_ratio/min": float(tokens.ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(tokens.ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(tokens.ratio.max()),
        "sampling/importance_sampling_ratio/std": float(tokens.ratio.std()),
        "sampling/importance_sampling_ratio/bounded": float(tokens.bounded.mean()),
        "sample/staleness_mean": float(tokens.staleness.mean()),
        "sample/staleness_max": int(tokens.staleness.max()),
        **agreement(tokens),
    }


def agreement(tokens: TokenRecord) -> dict[str, float]:
    """How far trainer and engine differ, over the tokens that both computed with equal weights.

    Behind an older token the engine's attention still reads what older weights made of it.
    """
    equal = (tokens.oldest == 0) & tokens.first.astype(bool)
    if not equal.any():
        return {}
    difference = np.abs(tokens.logprobs[equal] - tokens.behaviour[equal])
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
    }


def group_metrics(
    groups: Sequence[ScoredGroup], arrivals: Arrivals, weights: dict[str, float]
) -> dict[str, Any]:
    """Metrics of the rewards and lengths of all that came back in time, filtered groups included.

    trained/ and dropped/ tell what was trained apart from what came to lie over max_staleness: long
    completions are late, so what is dropped is no fair sample.
    """
    rewards = [group.rewards for group in groups]
    rewards += [verdict.rewards for verdict in arrivals.filtered if verdict.rewards]
    totals = [total_rewards(found, weights) for found in rewards]
    lengths = [len(r.token_ids) for group in groups for r in group.group.rollouts]
    clipped = [r.finish_reason == "length" for group in groups for r in group.group.rollouts]
    all_lengths = lengths + [n for verdict in arrivals.filtered for n in verdict.lengths]
    applied = [total[~np.isnan(total)] for total in totals]
    spreads = [np.std(total, ddof=1) for total in applied if len(total) > 1]
    logged = [group.metrics for group in groups] + [verdict.metrics for verdict in arrivals.filtered]
    custom = sorted({name for found in logged for name in found})
    failures = [failure for group in groups for failure in group.failures if failure]
    metrics: dict[str, Any] = {
        **{name: float(np.mean([m[name] for m in logged if name in m])) for name in custom},
        **_mean("reward", [np.mean(total) for total in applied if len(total)]),
        **_mean("reward_std", spreads),
        **_mean("frac_reward_zero_std", [spread < 1e-6 for spread in spreads]),
        "completions/mean_length": float(np.mean(all_lengths)),
        "completions/min_length": int(min(all_lengths)),
        "completions/max_length": int(max(all_lengths)),
        "completions/clipped_ratio": float(np.mean(clipped)),
        "groups/filtered": len(arrivals.filtered),
        "groups/dead": arrivals.dead,
        "groups/stale": arrivals.stale,
        "dropped/groups": len(arrivals.dropped),
        "dropped/total_groups": arrivals.total_dropped,
        **_averages("trained", groups, weights),
        **_averages("dropped", arrivals.dropped, weights),
    }
    metrics["rewards/unscored"] = len(failures)
    for name in weights:
        found_none = sum(v is None for found in rewards for v in found.get(name, ()))
        metrics[f"rewards/{name}/none"] = found_none - len(failures)
        values = [v for found in rewards for v in found.get(name, ()) if v is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))
            metrics[f"rewards/{name}/std"] = float(np.std(values))
    return metrics


def _averages(name: str, groups: Sequence[ScoredGroup], weights: dict[str, float]) -> dict[str, float]:
    """Mean reward and length of some groups; nothing of none."""
    if not groups:
        return {}
    totals = [total_rewards(scored.rewards, weights) for scored in groups]
    rewards = [np.nanmean(total) for total in totals if not np.isnan(total).all()]
    lengths = [len(rollout.token_ids) for scored in groups for rollout in scored.group.rollouts]
    return _mean(f"{name}/reward", rewards) | _mean(f"{name}/mean_length", lengths)


def _mean(name: str, values: Sequence[Any]) -> dict[str, float]:
    """The mean under its name; nothing of none."""
    return {name: float(np.mean(values))} if len(values) else {}


class Recorder:
    """Appends to the run's files. A full disk is waited for as `disk` says.

    `check` is called before each change; it raises RunTaken when they are a later learner's by now.
    """

    def __init__(
        self,
        folder: Path,
        report_to: Sequence[str],
        run: str,
        disk: Disk | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._disk = disk or Disk()
        self._check = check
        self._trackers = start_trackers(report_to, folder, run)

    def cut_after(self, step: int) -> None:
        """Drop what a learner that resumes at `step` will write again, and evaluations that are torn."""
        rows = [row for row in read_json_lines(self._folder / "metrics.jsonl") if row["step"] <= step]
        self._rewrite("metrics.jsonl", rows)
        self._rewrite("evaluations.jsonl", self._whole_evaluations())

    def _rewrite(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        data, path = "".join(_line(row) for row in rows).encode(), self._folder / name
        self._write(name, path, lambda: write_whole(path, data), len(data))

    def evaluated_steps(self) -> set[int]:
        """Steps whose version was evaluated, all its answers on disk."""
        return {row["step"] for row in self._whole_evaluations()}

    def _whole_evaluations(self) -> list[dict[str, Any]]:
        rows = read_json_lines(self._folder / "evaluations.jsonl")
        counts = Counter((row["step"], row["version"]) for row in rows)
        return [row for row in rows if counts[row["step"], row["version"]] == row["questions"]]

    def metrics(self, step: int, metrics: dict[str, Any], track: bool = True) -> None:
        """One line per step; trackers have those that are retrained already."""
        self._append("metrics.jsonl", {"step": step} | metrics | {"step": step})
        for tracker in self._trackers if track else ():
            tracker.log(metrics, step)

    def completions(self, step: int, rows: Sequence[dict[str, Any]], track: bool = True) -> None:
        """A file per step (learner/report/completions.py); trackers have what is retrained."""
        path = completions_path(self._folder, step)
        path.parent.mkdir(exist_ok=True)
        data = to_parquet(rows)
        self._write("completions", path, lambda: write_whole(path, data), len(data))
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
        self._append("evaluations.jsonl", *rows)
        for tracker in self._trackers:
            tracker.log(metrics, result.version.step)

    def results(self, name: str, metrics: dict[str, Any]) -> None:
        """The final figures, as NAME_results.json: train, eval."""
        path = self._folder / f"{name}_results.json"
        data = json.dumps(metrics, indent=2, default=str).encode()
        self._write(path.name, path, lambda: write_whole(path, data), len(data))

    def close(self) -> None:
        """End the trackers' run."""
        for tracker in self._trackers:
            tracker.close()

    def _append(self, name: str, *rows: dict[str, Any]) -> None:
        data, path = "".join(_line(row) for row in rows).encode(), self._folder / name
        with path.open("ab", buffering=0) as file:
            write = partial(append_whole, file, data, file.seek(0, os.SEEK_END), sync=False)
            self._write(name, path, write, len(data))

    def _write(self, what: str, path: Path, write: Callable[[], None], size: int) -> None:
        self._check()
        self._disk.write(what, path, write, size)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"
