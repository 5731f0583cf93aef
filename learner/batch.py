"""Scored groups to a Batch: plain arrays, advantages computed, over-lag tokens masked.

A pure function of the groups, the step and the settings, so the journal's groups give the same Batch
again. Dimensions: N sequences, L positions of a padded micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.messages import Rollout, ScoredGroup
from common.rewards import total_rewards
from learner.advantages import group_advantages


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One prompt with its completion; the arrays over the completion have length T."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    behaviour: np.ndarray
    mask: np.ndarray
    staleness: np.ndarray
    advantage: float
    temperature: float

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one Update trains on."""

    sequences: tuple[TrainSequence, ...]

    @property
    def trained_tokens(self) -> int:
        """Tokens that count in the loss."""
        return int(sum(sequence.mask.sum() for sequence in self.sequences))

    @property
    def completion_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


def build_batch(
    groups: Sequence[ScoredGroup], weights: dict[str, float], step: int, max_staleness: int
) -> Batch:
    """The Batch for the Update that follows `step`."""
    sequences = []
    for scored in groups:
        totals_G = total_rewards(scored.rewards, weights)
        advantages_G = group_advantages(totals_G)
        ticket = scored.group.ticket
        for rollout, total, advantage in zip(scored.group.rollouts, totals_G, advantages_G, strict=True):
            staleness = token_staleness(rollout, step)
            mask = rollout.mask & (staleness <= max_staleness) & (not np.isnan(total))
            sequences.append(
                TrainSequence(
                    prompt_ids=ticket.prompt_ids,
                    token_ids=rollout.token_ids,
                    behaviour=rollout.logprobs,
                    mask=mask,
                    staleness=staleness,
                    advantage=float(advantage),
                    temperature=ticket.sampling.temperature,
                )
            )
    return Batch(tuple(sequences))


def token_staleness(rollout: Rollout, step: int) -> np.ndarray:
    """Per token, how many versions ago it was sampled, (T,)."""
    staleness = np.zeros(len(rollout.token_ids), dtype=np.int64)
    for span in rollout.spans:
        staleness[span.start : span.end] = step - span.version.step
    return staleness


def is_over_lag(group: ScoredGroup, step: int, max_staleness: int) -> bool:
    """Whether no token of the group is fresh enough to be trained at this step."""
    return all(token_staleness(rollout, step).min() > max_staleness for rollout in group.group.rollouts)


def is_ahead(group: ScoredGroup, step: int) -> bool:
    """Whether a token was sampled by a version that this lineage has not reached."""
    return any(span.version.step > step for rollout in group.group.rollouts for span in rollout.spans)


def micro_batches(batch: Batch, max_positions: int) -> Iterator[list[TrainSequence]]:
    """Sequences of like length and one temperature, at most `max_positions` padded positions each."""
    ordered = sorted(batch.sequences, key=lambda item: (item.temperature, item.length))
    current: list[TrainSequence] = []
    for sequence in ordered:
        full = (len(current) + 1) * sequence.length > max_positions
        if current and (full or current[0].temperature != sequence.temperature):
            yield current
            current = []
        current.append(sequence)
    if current:
        yield current
