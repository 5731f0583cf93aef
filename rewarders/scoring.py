"""From one group to its outcome, under the run's contract, which may change."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.errors import ContractMismatch, MalformedMessage
from penstock.common.log import get_logger, shorten
from penstock.common.reward_totals import first_scored, group_totals
from penstock.common.text import SHOWN, as_text
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, check_tokenizer, describe_difference
from penstock.common.wire.messages import ANSWER, Group, Outcome, ScoredGroup, Verdict
from penstock.common.wire.reward_spec import JUDGE, RewardSpec
from penstock.common.wire.transcript import FAILED_TOOL
from penstock.rewarders.adapt import columns_of
from penstock.rewarders.filtering import why_filtered
from penstock.rewarders.reward_process import check_logged
from penstock.rewarders.rewards.answers import final_answer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

log = get_logger(__name__)

_NOT_THE_ANSWERS = "no completion is at fault; correct the reward, or the columns of this question"


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

    def set_aside(self, name: str) -> None:
        """Set the failure of each healthy rollout whose reward `name` is None.

        Otherwise the rollout's total would have a judge's unread answer as a 0.
        """
        for index in self.healthy:
            if self.rewards[name][index] is None:
                self.failures[index] = f"reward {name}: the judge's answer has no score"

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return a value per rollout: `values` has one per healthy rollout, the others get None."""
        given = iter(values)
        return [None if failure else next(given) for failure in self.failures]


@dataclass(frozen=True)
class Scorer:
    """Scores groups under one contract, with its tokenizer and a pool that loads its rewards."""

    contract: Contract
    tokenizer: Tokenizer
    pool: ScoringPool
    name: str

    def score_group(self, group: Group) -> Outcome:
        """Return the group with its rewards, or a Verdict if the group is filtered.

        Eval groups are never filtered. Raise ScoringFailed if too few rollouts could be scored, or a
        reward itself is at fault, MalformedMessage if a token id is negative, or as SandboxPool.run.
        """
        texts = self._decode([rollout.token_ids for rollout in group.rollouts])
        scores = self._score_texts(group, answers_of(group, texts))
        rewards = {name: tuple(values) for name, values in scores.rewards.items()}
        contract = self.contract
        totals = group_totals(rewards, contract.reward_weights, contract.multi_objective_aggregation)
        reason = why_filtered(totals, contract.filter_zero_std)
        if group.ticket.purpose == "eval":
            reason = None
            answers = answers_of(group, texts)
            scores.extra[ANSWER] = tuple(final_answer(text).strip()[:SHOWN] for text in answers)
        if reason is None:
            failures = tuple(scores.failures) if any(scores.failures) else ()
            logged = (scores.extra, scores.metrics)
            return ScoredGroup(group, rewards, tuple(texts), self.name, failures, *logged)
        lengths = tuple(rollout.length for rollout in group.rollouts)
        return Verdict(
            group.ticket.id, "filtered", reason, rewards, lengths, scores.metrics,
            as_text(group.ticket.columns.get("prompt", ""))[:SHOWN],
            texts[first_scored(rewards)][:SHOWN],
        )  # fmt: skip

    def _score_texts(self, group: Group, texts: list[str]) -> GroupScores:
        """Return all rewards of one group. A rollout that cannot be scored has None for every reward.

        Raise ScoringFailed with fewer than two rollouts left (or the only one), or as `_arguments` does.
        """
        arguments = self._arguments(group, texts)
        size = len(texts)
        scores = GroupScores([rollout.failure for rollout in group.rollouts])
        for spec in self.contract.rewards:
            self._score(spec, arguments | _state(spec, group), scores)
            if len(scores.healthy) < min(2, size):
                failures = [failure for failure in scores.failures if failure]
                raise ScoringFailed(f"{len(failures)} of {size} completions: {failures[0]}")
        for values in scores.rewards.values():
            for index, failure in enumerate(scores.failures):
                values[index] = None if failure else values[index]
        return scores

    def _score(self, spec: RewardSpec, arguments: dict[str, list[Any]], scores: GroupScores) -> None:
        """Add one reward to `scores`. If the call fails, find the completions at fault by single calls.

        Those get a failure. The others, if any, are scored together again: a reward may compare them.
        Raise ScoringFailed if that call fails, if the reward fails for the completion `0` too, or if all
        rewards together log too much.
        """
        try:
            found = self.pool.score(spec, _only(arguments, scores.healthy))
        except ScoringFailed as error:
            self._check_without_completion(spec, arguments, error)
            for index in scores.healthy:
                try:
                    self.pool.score(spec, _only(arguments, [index]))
                except ScoringFailed as alone:
                    scores.failures[index] = str(alone)[:SHOWN]
            if not scores.healthy:
                return
            found = self.pool.score(spec, _only(arguments, scores.healthy))
        scores.rewards[spec.name] = scores.spread(found.values)
        if spec.kind == JUDGE:
            scores.set_aside(spec.name)
        scores.extra |= {name: tuple(scores.spread(row)) for name, row in found.extra.items()}
        scores.metrics |= found.metrics
        try:
            check_logged(scores.extra, scores.metrics)
        except ValueError as error:
            raise ScoringFailed(f"reward {spec.name}, with those before: {error}") from error

    def _check_without_completion(
        self, spec: RewardSpec, arguments: dict[str, list[Any]], found: ScoringFailed
    ) -> None:
        """Raise ScoringFailed if the reward fails for the completion `0` too: no completion is at fault.

        `found` is the group's failure.
        """
        harmless = _only(arguments, [0]) | {"completions": ["0"], "completion_ids": [[0]]}
        harmless.pop("transcripts", None)
        try:
            self.pool.score(spec, harmless)
        except ScoringFailed as error:
            if str(error) == str(found):
                raise ScoringFailed(
                    f"{error}, for the completion `0` too: {_NOT_THE_ANSWERS}"
                ) from error
            alone = f"for the completion `0` alone: {error}"
            raise ScoringFailed(f"{found}; and {alone}: {_NOT_THE_ANSWERS}") from error

    def _arguments(self, group: Group, texts: list[str]) -> dict[str, list[Any]]:
        """Return a reward's arguments. Without a column `prompt` decode the ids. Raise as `_decode`."""
        prompt = group.ticket.columns.get("prompt")
        if prompt is None:
            (prompt,) = self._decode([group.ticket.prompt_ids])
        columns = columns_of(prompt, group.ticket.columns)
        return {name: [value] * len(texts) for name, value in columns.items()} | {
            "completions": texts,
            "completion_ids": [rollout.token_ids.tolist() for rollout in group.rollouts],
            **_transcripts(group),
        }

    def _decode(self, sequences: list[np.ndarray]) -> list[str]:
        """Return the texts of token ids, no special ones. Raise MalformedMessage for a negative id."""
        numbers = [ids.tolist() for ids in sequences]
        try:
            return self.tokenizer.decode_batch(numbers, skip_special_tokens=True)
        except OverflowError as error:
            raise MalformedMessage(
                f"a token id of the group is negative, which no actor sends: {error}"
            ) from error


def answers_of(group: Group, texts: Sequence[str]) -> list[str]:
    """Return the texts that rewards read: of a conversation the assistant's last message.

    `texts` are the decoded completions, which are returned for other rollouts.
    """
    answers = []
    for rollout, text in zip(group.rollouts, texts, strict=True):
        said = rollout.transcript.messages if rollout.transcript else ()
        own = [message for message in said if message.get("role") == "assistant"]
        answers.append(as_text(own[-1].get("content") or "") if own else text)
    return answers


def _transcripts(group: Group) -> dict[str, list[Any]]:
    """Return what rewards get of conversations: their messages, and the environments' rewards.

    Return {} if a rollout of the group is no conversation.
    """
    talks = [rollout.transcript for rollout in group.rollouts if rollout.transcript]
    if len(talks) < len(group.rollouts):
        return {}
    return {
        "transcripts": [[_in_trl(message) for message in talk.messages] for talk in talks],
        "environment_reward": [talk.reward for talk in talks],
    }


def _in_trl(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transcript's message with TRL's keys alone."""
    return {name: value for name, value in message.items() if name != FAILED_TOOL}


def _state(spec: RewardSpec, group: Group) -> dict[str, list[Any]]:
    """Return TRL's trainer_state of a user's reward: the Updates before the ticket was first issued.

    A group has the same state whenever it is scored. Built-in rewards get none.
    """
    if not spec.source:
        return {}
    state = {"global_step": group.ticket.version.step, "max_steps": spec.options.get("max_steps", 0)}
    return {"trainer_state": [state] * len(group.rollouts)}


def _only(arguments: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    """Return the arguments for the completions at `indices` alone."""
    return {name: [values[index] for index in indices] for name, values in arguments.items()}


def make_scorer(contract: Contract, pool: ScoringPool, name: str) -> Scorer:
    """Return a contract's scorer. Raise ContractMismatch or ConfigError if it does not fit here."""
    for spec in contract.rewards:
        if mistake := pool.check(spec):
            raise ContractMismatch(f"LEARNER_REWARDS: {spec.name} cannot be used here: {mistake}")
    folder = check_tokenizer(contract)
    return Scorer(contract, Tokenizer.from_file(str(folder / "tokenizer.json")), pool, name)


def _can_be_read(data: bytes) -> bool:
    """Return whether bytes are a contract, and log if not: the learner writes its own again."""
    try:
        decode(data, Contract)
    except MalformedMessage as error:
        log.error(shorten(f"The contract on the queue server cannot be read: {error}"))
        return False
    return True


class CurrentScorer:
    """The scorer of the contract in force, shared by all threads.

    Raise ContractMismatch or ConfigError if this process cannot serve the contract.
    """

    def __init__(self, view: RunView, pool: ScoringPool, name: str, contract: bytes) -> None:
        self._view = view
        self._pool = pool
        self._name = name
        self._changing = threading.Lock()
        self._scorer = self._make(contract)

    def for_group(self, group: Group) -> Scorer:
        """Return the scorer in force; for a group of another contract, read the contract again first.

        If the contract is still the same, the group is an old one: the learner decides what becomes of
        its outcome. Raise ContractMismatch if it cannot serve the new one, or as Connection.execute.
        """
        with self._changing:
            if group.ticket.contract != self._scorer.contract.hash:
                self._adopt(self._view.contract())
            return self._scorer

    def rejoin(self, timeout_s: float, stopping: threading.Event) -> None:
        """Wait until a learner has published a contract, and adopt it. Return early on `stopping`.

        Raise DeadlineExceeded if none was published in time, and as `for_group` does.
        """
        data = wait_for_contract(self._view, timeout_s, stopping)
        with self._changing:
            self._adopt(data)

    def _adopt(self, data: bytes | None) -> None:
        """Change to a contract and log it, unless None, in force or unreadable. Raise as `_make`."""
        before = self._scorer.contract
        if data is not None and data != encode(before) and _can_be_read(data):
            self._scorer = self._make(data)
            log.info("The contract changed.", changes=describe_difference(before, self._scorer.contract))

    def _make(self, data: bytes) -> Scorer:
        """Return a scorer of an encoded contract. Raise ContractMismatch if it is unusable here."""
        try:
            return make_scorer(decode(data, Contract), self._pool, self._name)
        except MalformedMessage as error:
            raise ContractMismatch(
                f"the learner's contract cannot be read: {error}. "
                "Install the learner's release of penstock for this rewarder."
            ) from error
