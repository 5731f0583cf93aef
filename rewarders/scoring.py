"""One group to its outcome under the run's contract."""

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
"""Columns of these names would collide with a reward's own arguments."""


@dataclass(slots=True)
class GroupScores:
    """What the rewards say of one group; `failures` says per rollout why it has none, or ""."""

    failures: list[str]
    rewards: dict[str, list[float | None]] = field(default_factory=dict)
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> list[int]:
        """Indices of the rollouts that could be scored so far."""
        return [index for index, failure in enumerate(self.failures) if not failure]


@dataclass(frozen=True)
class Scorer:
    """What a contract needs for scoring: its tokenizer, and a pool that loads its rewards."""

    contract: Contract
    tokenizer: Tokenizer
    pool: ScoringPool
    name: str

    def score_group(self, group: Group) -> Outcome:
        """The group with its rewards, or the verdict that it carries no signal.

        Eval groups are never filtered. Raises ScoringFailed, and MalformedMessage for bad tokens.
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
        """All rewards of one group.

        Rollouts that cannot be scored are left out and named. Raises ScoringFailed when fewer than two
        are left, or of one none: there is nothing to compare.
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
        """Add one reward. If it fails for the group, find out for which completions, and leave them out.

        Those that are left are scored together again: a reward may compare the completions of a group.
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
        """Raises ScoringFailed if it is the question or the reward itself: no completion is to blame.

        `found` is what the group failed with.
        """
        harmless = _only(arguments, [0]) | {"completions": ["0"], "completion_ids": [[0]]}
        try:
            self.pool.score(spec, harmless)
        except ScoringFailed as error:
            if str(error) == str(found):
                raise ScoringFailed(f"{error}, for the completion `0` too") from error
            raise ScoringFailed(f"{found}; and for the completion `0` alone: {error}") from error

    def _arguments(self, group: Group, texts: list[str]) -> dict[str, list[Any]]:
        """What rewards are called with; without a column `prompt` the prompt is that of the tokens."""
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
        try:
            return self.tokenizer.decode_batch(
                [ids.tolist() for ids in sequences], skip_special_tokens=True
            )
        except OverflowError as error:
            raise MalformedMessage(f"a token id is negative: {error}") from error


def _only(arguments: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    return {name: [values[index] for index in indices] for name, values in arguments.items()}


def _spread(values: Sequence[Any], indices: Sequence[int], size: int) -> list[Any]:
    """Values of some of `size` rollouts, None for the others."""
    row: list[Any] = [None] * size
    for index, value in zip(indices, values, strict=True):
        row[index] = value
    return row


def make_scorer(contract: Contract, pool: ScoringPool, name: str) -> Scorer:
    """Check that this process can serve the contract; raises ContractMismatch."""
    for spec in contract.rewards:
        if mistake := pool.check(spec):
            raise ContractMismatch(f"LEARNER_REWARDS: {spec.name} cannot be used here: {mistake}")
    folder = check_tokenizer(contract)
    return Scorer(contract, Tokenizer.from_file(str(folder / "tokenizer.json")), pool, name)
