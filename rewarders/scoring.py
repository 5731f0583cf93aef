"""From one group to its outcome, under the run's contract."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.common.errors import ContractMismatch, MalformedMessage
from penstock.common.reward_totals import first_scored, total_rewards
from penstock.common.text import SHOWN, as_text
from penstock.common.wire.contract import Contract, check_tokenizer
from penstock.common.wire.messages import ANSWER, Group, Outcome, ScoredGroup, Verdict
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.filtering import why_filtered
from penstock.rewarders.rewards.answers import final_answer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

_SIGNATURE = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
"""Arguments of every reward. Columns of the data set with these names are not passed on."""


@dataclass(slots=True)
class GroupScores:
    """The rewards of one group so far. `failures` has, per rollout, why it has no reward, or ""."""

    failures: list[str]
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> list[int]:
        """Indices of the rollouts without a failure."""
        return [index for index, failure in enumerate(self.failures) if not failure]


@dataclass(frozen=True)
class Scorer:
    """Scores groups under one contract, with its tokenizer and a pool that loads its rewards."""

    contract: Contract
    tokenizer: Tokenizer
    pool: ScoringPool
    name: str

    def score_group(self, group: Group) -> Outcome:
        """Return the group with its rewards, or a Verdict if the group is filtered.

        Eval groups are never filtered. Raise ScoringFailed if too few rollouts could be scored, and
        MalformedMessage if a token id is negative.
        """
        texts = self._decode([rollout.token_ids for rollout in group.rollouts])
        scores = self.score_texts(group, texts)
        rewards = {name: tuple(values) for name, values in scores.rewards.items()}
        totals = total_rewards(rewards, self.contract.reward_weights)
        reason = why_filtered(totals, self.contract.filter_zero_std)
        if group.ticket.purpose == "eval":
            scores.extra[ANSWER] = tuple(final_answer(text).strip()[:SHOWN] for text in texts)
        if reason is None or group.ticket.purpose == "eval":
            failures = tuple(scores.failures) if any(scores.failures) else ()
            return ScoredGroup(
                group, rewards, tuple(texts), self.name, failures, scores.extra, scores.metrics
            )
        lengths = tuple(len(rollout.token_ids) for rollout in group.rollouts)
        return Verdict(
            group.ticket.id, "filtered", reason, rewards, lengths, scores.metrics,
            as_text(group.ticket.columns.get("prompt", ""))[:SHOWN],
            texts[first_scored(rewards)][:SHOWN],
        )  # fmt: skip

    def score_texts(self, group: Group, texts: list[str]) -> GroupScores:
        """Return all rewards of one group. A rollout that cannot be scored has None for every reward.

        Raise ScoringFailed if fewer than two rollouts are left: there is nothing to compare. Of a group
        with a single rollout, that one must be left.
        """
        arguments = self._arguments(group, texts)
        size = len(texts)
        scores = GroupScores([""] * size)
        for spec in self.contract.rewards:
            self._score(spec, arguments, scores)
            if len(scores.healthy) < min(2, size):
                failures = [failure for failure in scores.failures if failure]
                raise ScoringFailed(f"{len(failures)} of {size} completions: {failures[0]}")
        for name, values in scores.rewards.items():
            scores.rewards[name] = [
                None if failure else value
                for value, failure in zip(values, scores.failures, strict=True)
            ]
        return scores

    def _score(self, spec: RewardSpec, arguments: dict[str, list[Any]], scores: GroupScores) -> None:
        """Add one reward to `scores`. If the call fails, find the completions at fault by single calls.

        The completions at fault get a failure. The others are scored together again, because a reward
        may compare the completions of a group. Raise ScoringFailed if no completion is at fault, or if
        the second call fails.
        """
        try:
            found = self.pool.score(spec, _only(arguments, scores.healthy))
        except ScoringFailed as error:
            self._check_without_completion(spec, arguments, error)
            for index in scores.healthy:
                try:
                    self.pool.score(spec, _only(arguments, [index]))
                except ScoringFailed as alone:
                    scores.failures[index] = str(alone)
            if not scores.healthy:
                return
            found = self.pool.score(spec, _only(arguments, scores.healthy))
        healthy = scores.healthy
        size = len(scores.failures)
        scores.rewards[spec.name] = _spread(found.values, healthy, size)
        scores.extra |= {name: tuple(_spread(row, healthy, size)) for name, row in found.extra.items()}
        scores.metrics |= found.metrics

    def _check_without_completion(
        self, spec: RewardSpec, arguments: dict[str, list[Any]], found: ScoringFailed
    ) -> None:
        """Raise ScoringFailed if the reward also fails for the completion `0`.

        Then the question or the reward is at fault, not a completion. `found` is the group's failure.
        """
        harmless = _only(arguments, [0]) | {"completions": ["0"], "completion_ids": [[0]]}
        try:
            self.pool.score(spec, harmless)
        except ScoringFailed as error:
            if str(error) == str(found):
                raise ScoringFailed(f"{error}, for the completion `0` too") from error
            raise ScoringFailed(f"{found}; and for the completion `0` alone: {error}") from error

    def _arguments(self, group: Group, texts: list[str]) -> dict[str, list[Any]]:
        """Return a reward's arguments. Without a column `prompt`, the prompt's tokens are decoded."""
        size = len(texts)
        columns = group.ticket.columns
        prompt = columns.get("prompt")
        if prompt is None:
            (prompt,) = self._decode([group.ticket.prompt_ids])
        kept = {name: [value] * size for name, value in columns.items() if name not in _SIGNATURE}
        kept.pop("prompt", None)
        return {
            "prompts": [prompt] * size,
            "completions": list(texts),
            "completion_ids": [rollout.token_ids.tolist() for rollout in group.rollouts],
            **kept,
        }

    def _decode(self, sequences: list[np.ndarray]) -> list[str]:
        """Return the texts of token ids, without special tokens; raise MalformedMessage."""
        try:
            return self.tokenizer.decode_batch(
                [ids.tolist() for ids in sequences], skip_special_tokens=True
            )
        except OverflowError as error:
            raise MalformedMessage(f"a token id is negative: {error}") from error


def _only(arguments: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    """Return the arguments for the completions at `indices` alone."""
    return {name: [values[index] for index in indices] for name, values in arguments.items()}


def _spread(values: Sequence[Any], indices: Sequence[int], size: int) -> list[Any]:
    """Return a row of `size` values: `values` at `indices`, None elsewhere."""
    row: list[Any] = [None] * size
    for index, value in zip(indices, values, strict=True):
        row[index] = value
    return row


def make_scorer(contract: Contract, pool: ScoringPool, name: str) -> Scorer:
    """Return a contract's scorer. Raise ContractMismatch if a reward or the tokenizer does not fit."""
    for spec in contract.rewards:
        if mistake := pool.check(spec):
            raise ContractMismatch(f"LEARNER_REWARDS: {spec.name} cannot be used here: {mistake}")
    folder = check_tokenizer(contract)
    return Scorer(contract, Tokenizer.from_file(str(folder / "tokenizer.json")), pool, name)
