"""Scored groups to a Batch: plain arrays, advantages computed, masks set.

A pure function of the groups, the reward weights, the step and the settings, which the journal holds,
so that it gives the same Batch again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.reward_totals import total_rewards
from penstock.common.wire.messages import Rollout, ScoredGroup
from penstock.learner.algorithm.advantages import compute_advantages


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
    groups: Sequence[ScoredGroup],
    reward_weights: Mapping[str, float],
    step: int,
    settings: LearnerSettings,
) -> Batch:
    """The Batch for the Update that follows `step`."""
    totals = [total_rewards(scored.rewards, reward_weights) for scored in groups]
    advantages = compute_advantages(totals, settings.advantage_estimator, settings.scale_rewards)
    sequences = []
    for scored, totals_G, advantages_G in zip(groups, totals, advantages, strict=True):
        ticket = scored.group.ticket
        for rollout, total, advantage in zip(scored.group.rollouts, totals_G, advantages_G, strict=True):
            staleness = token_staleness(rollout, step)
            fresh = staleness <= settings.max_staleness
            sequences.append(
                TrainSequence(
                    prompt_ids=ticket.prompt_ids,
                    token_ids=rollout.token_ids,
                    behaviour=rollout.logprobs,
                    mask=trainable_tokens(rollout, settings) & fresh & (not np.isnan(total)),
                    staleness=staleness,
                    advantage=float(advantage),
                    temperature=ticket.sampling.temperature,
                )
            )
    return Batch(tuple(sequences))


def trainable_tokens(rollout: Rollout, settings: LearnerSettings) -> np.ndarray:
    """Per token, whether it may be trained as far as its lag is not looked at, (T,).

    A completion that was cut says nothing of where the policy would have ended, but its reward still
    counts in its group's baseline, as in TRL.
    """
    if settings.mask_truncated_completions and rollout.finish_reason == "length":
        return np.zeros(len(rollout.token_ids), dtype=np.bool_)
    return rollout.mask


def token_staleness(rollout: Rollout, step: int) -> np.ndarray:
    """Per token, how many versions ago it was sampled, (T,)."""
    staleness = np.zeros(len(rollout.token_ids), dtype=np.int64)
    for span in rollout.spans:
        staleness[span.start : span.end] = step - span.version.step
    return staleness


def is_over_lag(scored: ScoredGroup, step: int, settings: LearnerSettings) -> bool:
    """Whether too many trainable tokens are over max_staleness: any (set_aside), or all (mask)."""
    over = np.concatenate(
        [
            token_staleness(rollout, step)[trainable_tokens(rollout, settings)] > settings.max_staleness
            for rollout in scored.group.rollouts
        ]
    )
    return bool(over.any() if settings.over_lag == "set_aside" else over.size and over.all())


def is_ahead(group: ScoredGroup, step: int) -> bool:
    """Whether a token was sampled by a version that this lineage has not reached."""
    return any(span.version.step > step for rollout in group.group.rollouts for span in rollout.spans)
