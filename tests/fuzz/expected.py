"""What may be trained and shown, stated once more and apart from the product's own checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.wire.messages import Rollout, ScoredGroup, Ticket, Version
from penstock.learner.algorithm.batch import Batch
from penstock.learner.algorithm.loss import LossOptions, LossTokens, aggregation_weights, policy_loss
from penstock.learner.policy.packing import build_row
from tests.fuzz.valid import NEWEST, VOCABULARY, WEIGHTS

LONGEST_TEXT = 1_000
LONGEST_REASON = 2_100  # of a verdict: what a worker may say, and the learner's words before it
LARGEST_REWARD = 1e9
LARGEST_METRIC = 1e100
LOWEST_LOGPROB = -104.0


class Wrong(Exception):
    """A message was accepted, and something about it cannot be right."""


def require(holds: object, text: str) -> None:
    """Raise Wrong unless it holds."""
    if not holds:
        raise Wrong(text)


def check_text(text: object, longest: int = LONGEST_TEXT) -> None:
    """Raise Wrong for a reason or an error that is not a short text."""
    require(isinstance(text, str), f"a reason that is no text: {text!r:.100}")
    require(len(str(text)) <= longest, f"a text of {len(str(text))} characters: {str(text)[:100]!r}")


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in content and in type, down to the sign of zero."""
    if type(one) is not type(other) and not (isinstance(one, str) and isinstance(other, str)):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(repr(one) == repr(other))


def check_as_issued(found: Ticket, issued: Ticket) -> None:
    """Raise Wrong if a field of a ticket is not what the learner issued."""
    for field in fields(Ticket):
        one, other = getattr(found, field.name), getattr(issued, field.name)
        require(
            same(one, other), f"{field.name} was issued as {other!r:.100} and came back as {one!r:.100}"
        )


def check_group(scored: ScoredGroup, issued: Ticket, published: Mapping[Version, str]) -> None:
    """Raise Wrong if an accepted group is no answer to the issued ticket, or cannot be sampled."""
    check_as_issued(scored.group.ticket, issued)
    size = issued.num_generations
    require(len(scored.group.rollouts) == len(scored.texts) == size, "another number of completions")
    for rollout in scored.group.rollouts:
        check_rollout(rollout, issued, published)
    require(set(scored.rewards) == set(WEIGHTS), f"it has the rewards {list(scored.rewards)}")
    for name, values in scored.rewards.items():
        require(len(values) == size, f"{len(values)} values of {name}")
        check_numbers(name, [value for value in values if value is not None])
    check_numbers("metrics", list(scored.metrics.values()), LARGEST_METRIC)
    for place, failure in enumerate(scored.failures):
        given = [values[place] for values in scored.rewards.values() if values[place] is not None]
        require(not (failure and given), f"completion {place} failed and has the rewards {given}")


def check_rollout(rollout: Rollout, issued: Ticket, published: Mapping[Version, str]) -> None:
    """Raise Wrong if this completion cannot have been sampled for the ticket."""
    size = len(rollout.token_ids)
    require(0 < size <= issued.sampling.max_tokens, f"{size} tokens")
    require(len(rollout.logprobs) == len(rollout.mask) == size, "arrays of several lengths")
    require(rollout.token_ids.min() >= 0 and rollout.token_ids.max() < VOCABULARY, "an unknown token")
    require(np.isfinite(rollout.logprobs).all(), "a log-probability is not finite")
    require(rollout.logprobs.max() <= 0, f"a probability above 1: {rollout.logprobs.max()}")
    require(rollout.logprobs.min() >= LOWEST_LOGPROB, f"a log-probability of {rollout.logprobs.min()}")
    require(rollout.finish_reason in ("stop", "length"), f"finish reason {rollout.finish_reason!r}")
    edges = [edge for span in rollout.spans for edge in (span.start, span.end)]
    require(
        [0, *edges] == [*sorted([0, *edges])] and edges[0] == 0 and edges[-1] == size, f"spans {edges}"
    )
    require(edges[1:-1:2] == edges[2::2], f"spans {edges} have gaps")
    require(bool(rollout.mask.all()), "an answer of a tool in a run without tools")
    for span in rollout.spans:
        require(span.version in published, f"version {span.version} was never published")
        require(span.hash == published[span.version], f"other weights than those of {span.version}")
        require(span.version.step >= issued.min_step, f"version {span.version} is older than the ticket")
        if issued.purpose == "eval":
            require(span.version == NEWEST, f"version {span.version} was not evaluated")


def check_numbers(name: str, values: list[Any], largest: float = LARGEST_REWARD) -> None:
    """Raise Wrong unless all values are finite numbers within the bound."""
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(number and math.isfinite(value) and abs(value) <= largest, f"{name} holds {value!r:.60}")


def check_json(name: str, value: Any) -> None:
    """Raise Wrong if a table or a metric holds what JSON has no number for."""
    try:
        json.dumps(value, allow_nan=False).encode()
    except ValueError as error:
        raise Wrong(f"{name} cannot be written as JSON: {error}") from error


LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {
        "loss_type": "gspo",
        "importance_sampling_correction": "sequence",
        "importance_sampling_mode": "clip",
    },
    {"loss_type": "cispo", "importance_sampling_correction": "off", "beta": 0.1},
    {
        "loss_type": "grpo",
        "decoupled_loss": True,
        "importance_sampling_mode": "mask",
        "entropy_coef": 0.01,
    },
    {
        "loss_type": "dppo",
        "importance_sampling_correction": "geometric",
        "beta": 0.1,
        "kl_estimator": "k2",
    },
    {"loss_type": "dr_grpo", "scale_rewards": "batch"},
)
"""Settings under which the loss of every accepted group is computed."""


def check_loss(batch: Batch, settings: LearnerSettings) -> None:
    """Raise Wrong if a value of the batch, its loss or its gradient is not finite."""
    sequences = batch.sequences
    for sequence in sequences:
        require(math.isfinite(sequence.advantage), f"an advantage of {sequence.advantage}")
        require(
            not sequence.mask.any() or sequence.staleness[sequence.mask].min() >= 0, "a negative age"
        )
    row = build_row(list(sequences), torch.device("cpu"))
    logprobs = torch.full_like(row.behaviour_N, -1.0, requires_grad=True)
    lengths = np.array([int(sequence.mask.sum()) for sequence in sequences])
    weights = aggregation_weights(
        lengths, loss_type=settings.loss_type, batch_tokens=max(1, batch.trained_tokens), mini_batches=1,
        max_completion_length=settings.max_completion_length,
    )  # fmt: skip
    weight = torch.as_tensor(weights, dtype=torch.float32)[row.sequence_N]
    old = logprobs.detach() - 0.1 if settings.decoupled_loss else row.behaviour_N
    tokens = LossTokens(
        logprobs, torch.ones_like(logprobs), old, row.behaviour_N,
        torch.full_like(old, -1.5) if settings.beta else None, row.advantages_N, weight, row.mask_N,
        row.sequence_N, row.sequences,
    )  # fmt: skip
    loss = policy_loss(tokens, LossOptions.from_settings(settings)).loss
    require(torch.isfinite(loss), f"the loss is {loss.item()} with {settings.loss_type}")
    loss.backward()
    found = logprobs.grad
    require(
        found is None or torch.isfinite(found).all(), f"a gradient of {settings.loss_type} is not finite"
    )
