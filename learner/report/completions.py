"""Tables of completions for people: one Parquet file per step, with TRL's columns and some more.

    step, prompt, completion, advantage, one column per reward      as TRL
    ticket, index, state                                            group, number in it, end state
    reward, completion_length, finish_reason, staleness_mean, staleness_max, versions, actors, failure,
    solution
    extra                                                           log_extra of the rewards, as JSON

A filtered group has one row: its first completion with rewards, `state` filtered.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.common.reward_totals import Rewards, first_scored, total_rewards
from penstock.common.text import as_text, indented
from penstock.common.wire.messages import Rollout, ScoredGroup, Verdict
from penstock.common.wire.transcript import FAILED_TOOL
from penstock.learner.algorithm.batch import Batch, token_staleness


def completion_rows(
    step: int, groups: Sequence[ScoredGroup], filtered: Sequence[Verdict], batch: Batch,
    weights: Mapping[str, float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row (column: value) per rollout of `groups`, then one per verdict of `filtered`.

    `step`, counted from 1, is the step that trained `groups`. `batch` was made of these groups and gives
    the advantages: its rollouts are theirs, in their order. `weights` has by reward name the factor in
    the total reward. A verdict without rewards gets no row. Raise KeyError if a reward has no weight.
    """
    of_rollout = dict(zip(batch.rollout_S.tolist(), batch.sequences, strict=True))
    advantages = iter(sequence.advantage for sequence in of_rollout.values())
    rows = [
        _trained_row(step, scored, index, next(advantages), weights)
        for scored in groups
        for index in range(len(scored.group.rollouts))
    ]
    return rows + [_filtered_row(step, verdict, weights) for verdict in filtered if verdict.rewards]


def _trained_row(
    step: int, scored: ScoredGroup, index: int, advantage: float, weights: Mapping[str, float]
) -> dict[str, Any]:
    """Return the row of rollout `index`, counted from 0, of a group that step `step` trained.

    `advantage` is that of the rollout, and `weights` has by reward name the factor in the total reward.
    The column `completion` has the messages of a conversation, or the text of a single completion.
    `state` is "failed" if the rollout could not be scored, else "trained". Staleness counts from the
    version before the step: at step 7 a token of version 5 has 1. `versions` says which version sampled
    which tokens, such as `1.0:0-182 1.1:182-200`; ` | ` stands between sequences. `actors` says the same
    of the actors, of which there are several if one had to end and another continued. Raise KeyError if
    a reward has no weight.
    """
    ticket, rollout = scored.group.ticket, scored.group.rollouts[index]
    staleness = np.concatenate([token_staleness(one, step - 1) for one in rollout.sequences])
    failure = scored.failures[index] if scored.failures else ""
    extra = {name: row[index] for name, row in scored.extra.items()}
    return _row(step, ticket.id, index, scored.rewards, weights) | {
        "prompt": as_text(ticket.columns.get("prompt", "")),
        "completion": _conversation(rollout) or scored.texts[index],
        "advantage": advantage,
        "state": "failed" if failure else "trained",
        "failure": failure,
        "completion_length": rollout.length,
        "finish_reason": rollout.finish_reason,
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "versions": " | ".join(map(_versions, rollout.sequences)),
        "actors": " | ".join(_actors(one, scored.group.actor) for one in rollout.sequences),
        "solution": as_text(ticket.columns.get("solution", "")),
        "extra": json.dumps(extra, default=str, skipkeys=True),
    }


def _versions(sequence: Rollout) -> str:
    """Return which version sampled which tokens of a sequence, such as `1.0:0-182 1.1:182-200`."""
    return " ".join(f"{span.version}:{span.start}-{span.end}" for span in sequence.spans)


def _actors(sequence: Rollout, last: str) -> str:
    """Return which actor sampled which tokens of a sequence, such as `actor-a:0-650 actor-b:650-900`.

    `last` is the actor of the group, which sampled the tokens of spans that name none.
    """
    edges: list[tuple[str, int, int]] = []
    for span in sequence.spans:
        name = span.actor or last
        start = edges.pop()[1] if edges and edges[-1][0] == name else span.start
        edges.append((name, start, span.end))
    return " ".join(f"{name}:{start}-{end}" for name, start, end in edges)


def _conversation(rollout: Rollout) -> str:
    """Return the messages after the prompt, joined by line ends; "" for a single completion.

    A message is its role and name, "(failed)" for a tool that failed, its content, and its calls with
    arguments as JSON. Content and calls of one message are on lines of their own; all its lines but the
    first are indented by two spaces. Of several sequences these are the last one's, after a line with
    their number. Example: two messages, "[assistant] add {"a": 1}" and "[tool add] 3".
    """
    said = [f"({len(rollout.sequences)} sequences; the last:)"] if rollout.earlier else []
    for message in rollout.transcript.messages if rollout.transcript else ():
        role = f"[{message.get('role', '')} {message.get('name', '')}".rstrip() + "]"
        parts = [as_text(message.get("content") or "")]
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            parts.append(f"{function.get('name')} {as_text(function.get('arguments'))}")
        failed = " (failed)" if message.get(FAILED_TOOL) else ""
        said.append(indented(f"{role}{failed} " + "\n".join(filter(None, parts))))
    return "\n".join(said)


def _filtered_row(step: int, verdict: Verdict, weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the row of a filtered group, for its first rollout with a reward (column to value).

    `step` is the number of the step before which the group ended. `weights` has by reward name the
    factor in the total reward. Prompt and completion are the verdict's, which may be cut, and `failure`
    is its reason. Columns for which a verdict has no value, such as `versions`, are empty as in `_row`;
    so is completion_length (0) if the verdict has no lengths. Raise KeyError if a reward has no weight.
    """
    index = first_scored(verdict.rewards)
    return _row(step, verdict.ticket_id, index, verdict.rewards, weights) | {
        "prompt": verdict.prompt,
        "completion": verdict.completion,
        "failure": verdict.reason,
        "completion_length": verdict.lengths[index] if verdict.lengths else 0,
    }


def _row(
    step: int, ticket: str, index: int, rewards: Rewards, weights: Mapping[str, float]
) -> dict[str, Any]:
    """Return all columns of a row, in the table's order, with the values that come from the rewards.

    These are step, ticket (an id), index (of the rollout in its group), each of its rewards, and
    `reward`, their sum by `weights`, None without rewards. `rewards` has by name a value per rollout.
    `state` is "filtered". The other columns are 0, 0.0, None, "" or "{}", for the caller to replace. The
    arguments are not changed. Raise KeyError if a reward has no weight.
    """
    total = float(total_rewards(rewards, weights)[index])
    return {
        "step": step, "prompt": "", "completion": "", "advantage": 0.0,
        **{name: values[index] for name, values in rewards.items()},
        "reward": None if np.isnan(total) else total, "ticket": ticket, "index": index,
        "state": "filtered", "failure": "", "completion_length": 0, "finish_reason": "",
        "staleness_mean": None, "staleness_max": None, "versions": "", "actors": "", "solution": "",
        "extra": "{}",
    }  # fmt: skip


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the bytes of a Parquet file with `rows`, which map columns to values.

    The first row names the columns. A later row that lacks one has null there, and its other columns are
    left out. Raise ArrowException if a column mixes kinds of values, OverflowError beyond 64 bits.
    """
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()
