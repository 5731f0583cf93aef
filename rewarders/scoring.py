"""One group to its outcome under the run's contract."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from common.contract import Contract, check_tokenizer
from common.errors import ContractMismatch, MalformedMessage
from common.messages import Group, Outcome, ScoredGroup, Verdict
from common.rewards import total_rewards
from rewarders.filtering import why_filtered
from rewarders.pool import ScoringPool

_SIGNATURE = ("prompts", "completions")
"""Columns of these names would collide with a reward's own arguments."""


@dataclass(frozen=True)
class Scorer:
    """What a contract needs for scoring: its tokenizer, and a pool that knows its rewards."""

    contract: Contract
    tokenizer: Tokenizer
    pool: ScoringPool
    name: str

    def score_group(self, group: Group) -> Outcome:
        """The group with its rewards, or the verdict that it carries no signal.

        Eval groups are never filtered. Raises ScoringFailed, and MalformedMessage for bad tokens.
        """
        texts = self._decode([rollout.token_ids for rollout in group.rollouts])
        rewards = self._rewards(group, texts)
        totals = total_rewards(rewards, self._weights)
        reason = why_filtered(totals, self.contract.filter_zero_std)
        if reason is None or group.ticket.purpose == "eval":
            return ScoredGroup(group, rewards, tuple(texts), self.name)
        lengths = tuple(len(rollout.token_ids) for rollout in group.rollouts)
        return Verdict(group.ticket.id, "filtered", reason, rewards, lengths)

    @property
    def _weights(self) -> dict[str, float]:
        return dict(zip(self.contract.rewards, self.contract.reward_weights, strict=True))

    def _rewards(self, group: Group, texts: list[str]) -> dict[str, tuple[float | None, ...]]:
        size = len(texts)
        prompts = self._decode([group.ticket.prompt_ids]) * size
        columns = {
            name: [value] * size
            for name, value in group.ticket.columns.items()
            if name not in _SIGNATURE
        }
        if self.contract.solution_column in group.ticket.columns:
            columns["solution"] = [group.ticket.columns[self.contract.solution_column]] * size
        return {name: self.pool.score(name, prompts, texts, columns) for name in self.contract.rewards}

    def _decode(self, sequences: list[np.ndarray]) -> list[str]:
        try:
            return self.tokenizer.decode_batch(
                [ids.tolist() for ids in sequences], skip_special_tokens=True
            )
        except OverflowError as error:
            raise MalformedMessage(f"a token id is negative: {error}") from error


def make_scorer(contract: Contract, pool: ScoringPool, name: str) -> Scorer:
    """Check that this process can serve the contract; raises ContractMismatch."""
    unknown = [reward for reward in contract.rewards if reward not in pool.rewards]
    if unknown:
        raise ContractMismatch(
            f"the contract asks for rewards that are unknown here: {', '.join(unknown)}; known are "
            f"{', '.join(pool.rewards)}: correct LEARNER_REWARDS, or install the learner's release"
        )
    folder = check_tokenizer(contract)
    return Scorer(contract, Tokenizer.from_file(str(folder / "tokenizer.json")), pool, name)
