"""The Batch of an Update, made from scored groups: arrays, advantages and masks.

`build_batch` is a pure function of groups, reward weights, step and settings. The journal stores all
four, so a resume or a replay builds the same Batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from penstock.common.config.learner_settings import AdvantageEstimator, LearnerSettings, ScaleRewards
from penstock.common.reward_totals import group_totals
from penstock.common.wire.messages import Rollout, ScoredGroup, Ticket
from penstock.learner.algorithm.advantages import compute_advantages


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A prompt with one completion of T tokens."""

    prompt_ids: np.ndarray
    token_ids: np.ndarray  # (T,)
    behaviour: np.ndarray  # (T,): log-probabilities under the policy that sampled the tokens
    mask: np.ndarray  # (T,): whether the token is trained
    staleness: np.ndarray  # (T,): how many versions ago the token was sampled
    advantage: float
    temperature: float

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the completion together."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences that one Update trains on.

    `owners` has the index of each sequence's rollout, ascending; empty if each rollout has one sequence.
    """

    sequences: tuple[TrainSequence, ...]
    owners: tuple[int, ...] = ()

    @property
    def rollout_S(self) -> np.ndarray:
        """Index of each sequence's rollout, (S,): [0, 1, 1] if the second rollout has two sequences."""
        return np.array(self.owners or range(len(self.sequences)), dtype=np.int64)

    @property
    def trained_tokens(self) -> int:
        """Number of completion tokens of all sequences whose `mask` is True: those are trained."""
        return int(sum(sequence.mask.sum() for sequence in self.sequences))

    @property
    def completion_tokens(self) -> int:
        """Number of completion tokens of all sequences, trained or not. Prompts do not count."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


def build_batch(
    groups: Sequence[ScoredGroup], reward_weights: Mapping[str, float], step: int,
    settings: LearnerSettings,
) -> Batch:  # fmt: skip
    """Return the Batch that the next Update trains on, when `step` Updates were made before.

    The Batch has one sequence per rollout, or per sequence of an agent's rollout, in the order of
    `groups` and of their rollouts. Each has the rollout's advantage, which compute_advantages gives for
    the totals of all groups. `reward_weights` has the weight of each reward by its name. A token is
    trained if `trainable_tokens` allows it, its rollout has a reward, and its staleness is at most
    settings.max_staleness. Example: max_staleness 2 and step 7: tokens of versions 5 to 7 are trained.
    Of `settings` also multi_objective_aggregation, advantage_estimator, scale_rewards and
    mask_truncated_completions count. The arrays of the groups are not copied. No groups give an empty
    Batch. Raise KeyError if `reward_weights` lacks a reward of a group.
    """
    aggregation = settings.multi_objective_aggregation
    totals = [group_totals(scored.rewards, reward_weights, aggregation) for scored in groups]
    advantages = compute_advantages(totals, *_normalization(settings))
    sequences: list[TrainSequence] = []
    owners: list[int] = []
    for scored, totals_G, advantages_G in zip(groups, totals, advantages, strict=True):
        ticket = scored.group.ticket
        for rollout, total, advantage in zip(scored.group.rollouts, totals_G, advantages_G, strict=True):
            owner = owners[-1] + 1 if owners else 0
            for one in rollout.sequences:
                staleness = token_staleness(one, step)
                fresh = staleness <= settings.max_staleness
                mask = trainable_tokens(one, settings) & fresh & (not np.isnan(total))
                owners.append(owner)
                sequences.append(TrainSequence(
                    prompt_of(ticket, one), one.token_ids, one.logprobs, mask, staleness,
                    advantage=float(advantage), temperature=ticket.sampling.temperature,
                ))  # fmt: skip
    return Batch(tuple(sequences), tuple(owners))


def prompt_of(ticket: Ticket, rollout: Rollout) -> np.ndarray:
    """Return the token ids of a sequence's prompt (P,), which are not copied.

    These are the sequence's prompt_ids, or the prompt_ids of its `ticket` if the sequence's are empty. A
    sequence has a prompt of its own if an environment extended the ticket's, or an agent wrote it.
    """
    return rollout.prompt_ids if len(rollout.prompt_ids) else ticket.prompt_ids


def _normalization(settings: LearnerSettings) -> tuple[AdvantageEstimator, ScaleRewards]:
    """Return the names of baseline and scale, which are compute_advantages' `estimator` and `scale`.

    These are the settings advantage_estimator and scale_rewards. With the aggregation normalize_then_sum
    they are "reinforce_plus_plus" and "batch": mean and standard deviation of the batch. That is the
    second step of GDPO (arXiv:2601.05242), which keeps the size of the advantages the same for any
    number of rewards.
    """
    if settings.multi_objective_aggregation == "normalize_then_sum":
        return "reinforce_plus_plus", "batch"
    return settings.advantage_estimator, settings.scale_rewards


def trainable_tokens(rollout: Rollout, settings: LearnerSettings) -> np.ndarray:
    """Return for each token after a sequence's prompt whether it may be trained at all: bool (T,).

    This is the sequence's own mask, not a copy: True for the tokens that the policy sampled. With
    settings.mask_truncated_completions it is a new array of False if the sequence was cut at the longest
    length (finish_reason "length"). The reward of a cut rollout still counts in the baseline, as in TRL.
    """
    if settings.mask_truncated_completions and rollout.finish_reason == "length":
        return np.zeros(len(rollout.token_ids), dtype=np.bool_)
    return rollout.mask


def token_staleness(rollout: Rollout, step: int) -> np.ndarray:
    """Return for each token after a sequence's prompt how many versions ago it was sampled, int64 (T,).

    `step` is the number of Updates made so far. Tokens of no span, which tools or environments wrote,
    have staleness 0. Example: at step 7, tokens of the version of step 5 have staleness 2.
    """
    staleness = np.zeros(len(rollout.token_ids), dtype=np.int64)
    for span in rollout.spans:
        staleness[span.start : span.end] = step - span.version.step
    return staleness


def is_over_lag(scored: ScoredGroup, step: int, settings: LearnerSettings) -> bool:
    """Return whether the group is too stale to be trained after `step` Updates.

    With LEARNER_OVER_LAG=set_aside a single trainable token whose staleness is over max_staleness makes
    the group too stale. With `mask` all its trainable tokens must be over max_staleness, because
    `build_batch` leaves single ones untrained. Trainable are the tokens that the policy sampled, less
    those of rollouts without a reward, such as one whose environment broke, and of completions that the
    setting mask_truncated_completions leaves out. A group without trainable tokens is never too stale.
    Example: max_staleness 2 and step 7, tokens of versions 4 and 5: too stale with set_aside only.
    """
    rewarded = [set(row) != {None} for row in zip(*scored.rewards.values(), strict=True)]
    made = [one for rollout in compress(scored.group.rollouts, rewarded) for one in rollout.sequences]
    lags = [np.empty(0), *(token_staleness(one, step)[trainable_tokens(one, settings)] for one in made)]
    over = np.concatenate(lags) > settings.max_staleness
    return bool(over.any() if settings.over_lag == "set_aside" else over.size and over.all())
