"""What was sampled, to be read by people: one Parquet file per step, with TRL's columns and some more.

    step, prompt, completion, advantage, one column per reward      as TRL
    ticket, index, state                                            the group, its rollout, its fate
    reward, completion_length, finish_reason, staleness_mean, staleness_max, versions, failure, solution
    and what rewards gave to log_extra

Of a group that was filtered there is the first completion that has rewards; `state` says so.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.common.reward_totals import first_scored, total_rewards
from penstock.common.text import as_text
from penstock.common.wire.messages import Rollout, ScoredGroup, Verdict
from penstock.learner.algorithm.batch import Batch, token_staleness


def completion_rows(
    step: int,
    groups: Sequence[ScoredGroup],
    filtered: Sequence[Verdict],
    batch: Batch,
    weights: Mapping[str, float],
) -> list[dict[str, Any]]:
    """One row per completion of the batch that became step `step`, and one per filtered group.

    `batch` is what was built of the groups, rollout by rollout.
    """
    advantages = iter(sequence.advantage for sequence in batch.sequences)
    rows = [
        _row(step, scored, index, next(advantages), weights)
        for scored in groups
        for index in range(len(scored.group.rollouts))
    ]
    return rows + [_filtered_row(step, verdict, weights) for verdict in filtered if verdict.rewards]


def _row(
    step: int, scored: ScoredGroup, index: int, advantage: float, weights: Mapping[str, float]
) -> dict[str, Any]:
    ticket, rollout = scored.group.ticket, scored.group.rollouts[index]
    staleness = token_staleness(rollout, step - 1)
    total = float(total_rewards(scored.rewards, weights)[index])
    return {
        "step": step,
        "prompt": as_text(ticket.columns.get("prompt", "")),
        "completion": scored.texts[index],
        "advantage": advantage,
        **{name: values[index] for name, values in scored.rewards.items()},
        "reward": None if np.isnan(total) else total,
        "ticket": ticket.id,
        "index": index,
        "state": "failed" if scored.failures and scored.failures[index] else "trained",
        "failure": scored.failures[index] if scored.failures else "",
        "completion_length": len(rollout.token_ids),
        "finish_reason": rollout.finish_reason,
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "versions": _versions(rollout),
        "solution": as_text(ticket.columns.get("solution", "")),
        "extra": json.dumps(
            {name: row[index] for name, row in scored.extra.items()}, default=str, skipkeys=True
        ),
    }


def _filtered_row(step: int, verdict: Verdict, weights: Mapping[str, float]) -> dict[str, Any]:
    index = first_scored(verdict.rewards)
    total = float(total_rewards(verdict.rewards, weights)[index])
    return {
        "step": step,
        "prompt": verdict.prompt,
        "completion": verdict.completion,
        "advantage": 0.0,
        **{name: values[index] for name, values in verdict.rewards.items()},
        "reward": None if np.isnan(total) else total,
        "ticket": verdict.ticket_id,
        "index": index,
        "state": "filtered",
        "failure": verdict.reason,
        "completion_length": verdict.lengths[index] if verdict.lengths else 0,
        "finish_reason": "",
        "staleness_mean": None,
        "staleness_max": None,
        "versions": "",
        "solution": "",
        "extra": "{}",
    }


def _versions(rollout: Rollout) -> str:
    """Which tokens were sampled by which version, such as `1.0:0-182 1.1:182-200`."""
    return " ".join(f"{span.version}:{span.start}-{span.end}" for span in rollout.spans)


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A table as the bytes of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()
