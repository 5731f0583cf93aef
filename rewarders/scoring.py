"""From one group to its outcome, under the run's contract, which may change."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.errors import ContractMismatch, MalformedMessage
from penstock.common.log import get_logger, shorten
from penstock.common.reward_totals import first_scored, group_totals
from penstock.common.sandbox.handle import TOO_LONG
from penstock.common.text import SHOWN, as_text
from penstock.common.transfer.model_folder import ModelFetcher
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, check_tokenizer, describe_difference
from penstock.common.wire.limits import MOST_NAMES
from penstock.common.wire.messages import ANSWER, UNSCORED, Group, Outcome, ScoredGroup, Verdict
from penstock.common.wire.reward_spec import JUDGE, RewardSpec
from penstock.common.wire.transcript import FAILED_TOOL
from penstock.rewarders.adapt import columns_of
from penstock.rewarders.failures import Failures
from penstock.rewarders.filtering import why_filtered
from penstock.rewarders.reward_process import check_logged
from penstock.rewarders.rewards.answers import final_answer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

log = get_logger(__name__)

_ONE_FAILED = "the completion has no reward, the others of its group are scored"
_MOST_LATE = 3
"""Completions of a group for which a reward may take all of REWARDER_TIMEOUT_S; others get a tenth."""
_A_TENTH = (
    f"that is a tenth of it, because {_MOST_LATE} completions of the group took more than all of it"
)
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
        """Return the indices of the rollouts without a failure, in order: a new list."""
        return [index for index, failure in enumerate(self.failures) if not failure]

    def check_enough(self) -> None:
        """Raise ScoringFailed if fewer than two rollouts (of a single one: none) have no failure."""
        failures = [failure for failure in self.failures if failure]
        if len(self.healthy) < min(2, len(self.failures)):
            few = f"{len(failures)} of {len(self.failures)} completions have no reward"
            left = "which leaves too few; correct what failed first"
            raise ScoringFailed(f"{few}, {left}: {failures[0]}")

    def set_aside(self, name: str) -> None:
        """Store a failure for each rollout that has none and for which the reward `name` is None.

        The reward is a judge's, and the failure says that the answer has no score. Otherwise the
        rollout's total would count the missing score as 0.
        """
        for index in self.healthy:
            if self.rewards[name][index] is None:
                self.failures[index] = f"reward {name}: the judge's answer has no score"

    def explain(self, reason: str) -> str:
        """Return why a group is filtered: `reason`, and how many completions failed, with the first."""
        if not (failed := [failure for failure in self.failures if failure]):
            return reason
        counts = f"{len(failed)} of {len(self.failures)} completions {UNSCORED}, the first"
        return f"{reason}; {counts}: {failed[0]}"[:SHOWN]

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return a new list with a value per rollout: in order those of `values`, None for failures.

        `values` has one value for each rollout without a failure.
        """
        given = iter(values)
        return [None if failure else next(given) for failure in self.failures]


@dataclass(frozen=True)
class Scorer:
    """Scores groups under one contract, with its tokenizer and a pool that loads its rewards."""

    contract: Contract
    tokenizer: Tokenizer
    pool: ScoringPool
    name: str
    failed: Failures = field(default_factory=Failures)

    def score_group(self, group: Group) -> Outcome:
        """Return a ScoredGroup: the group with its rewards, texts, failures and what rewards logged.

        Return a Verdict "filtered" instead, with the reason, if fewer than two rollouts have a reward
        or, with the contract's filter_zero_std, all totals are equal. Groups of an evaluation are never
        filtered, and get a column `answer` of the completions' final answers. Raise ScoringFailed if a
        reward itself is at fault, or fewer than two rollouts could be scored (of a single one: none).
        Raise MalformedMessage for a negative token id, SandboxFailed or ConfigError if no scoring
        process can be started.
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
            if len(scores.extra) >= MOST_NAMES:  # a reward logs as many columns as there may be
                scores.extra.popitem()
            scores.extra[ANSWER] = tuple(final_answer(text).strip()[:SHOWN] for text in answers)
        if reason is None:
            failures = tuple(scores.failures) if any(scores.failures) else ()
            logged = (scores.extra, scores.metrics)
            return ScoredGroup(group, rewards, tuple(texts), self.name, failures, *logged)
        lengths = tuple(rollout.length for rollout in group.rollouts)
        return Verdict(
            group.ticket.id, "filtered", scores.explain(reason), rewards, lengths, scores.metrics,
            as_text(group.ticket.columns.get("prompt", ""))[:SHOWN],
            texts[first_scored(rewards)][:SHOWN],
        )  # fmt: skip

    def _score_texts(self, group: Group, texts: list[str]) -> GroupScores:
        """Return the rewards, logged data and failures of one group, whose `texts` the rewards read.

        A rollout for which its environment or one reward failed has None for every reward. Raise
        ScoringFailed if fewer than two rollouts (of a single one: none) could be scored or a reward
        itself is at fault, MalformedMessage for a negative token id.
        """
        arguments = self._arguments(group, texts)
        scores = GroupScores([rollout.failure for rollout in group.rollouts])
        scores.check_enough()
        for spec in self.contract.rewards:
            self._score(spec, arguments | _state(spec, group), scores)
            scores.check_enough()
        for values in scores.rewards.values():
            for index, failure in enumerate(scores.failures):
                values[index] = None if failure else values[index]
        return scores

    def _score(self, spec: RewardSpec, arguments: dict[str, list[Any]], scores: GroupScores) -> None:
        """Add the values of the reward `spec`, and what it logged, to `scores`.

        `arguments` have one value per rollout. Rollouts with a failure are not passed, and get None. If
        the call fails, each completion is scored alone, and those for which that does not fail are
        scored together again: a reward may compare them. This may take REWARDER_TIMEOUT_S longer than
        the calls one by one took. If none is left, no values are added. A judge's missing score is a
        failure of its rollout too. Raise ScoringFailed if that second call fails, if the reward fails
        for the harmless completion `0` too, or if all rewards of the group together logged too much.
        """
        try:
            found = self.pool.score(spec, _only(arguments, scores.healthy))
        except ScoringFailed as error:
            if TOO_LONG in str(error):  # said before the tries that may take as long again
                self.failed.tell(str(error), "its completions are tried one by one")
            self._check_without_completion(spec, _only(arguments, scores.healthy[:1]), error)
            began = time.monotonic()
            self._score_alone(spec, arguments, scores)
            if not scores.healthy:
                return
            limit_s = self.pool.timeout_s + time.monotonic() - began
            found = self.pool.score(spec, _only(arguments, scores.healthy), limit_s)
        scores.rewards[spec.name] = scores.spread(found.values)
        if spec.kind == JUDGE:
            scores.set_aside(spec.name)
        scores.extra |= {name: tuple(scores.spread(row)) for name, row in found.extra.items()}
        scores.metrics |= found.metrics
        try:
            check_logged(scores.extra, scores.metrics)
        except ValueError as error:
            raise ScoringFailed(f"reward {spec.name} and those before it: {error}") from error

    def _score_alone(
        self, spec: RewardSpec, arguments: dict[str, list[Any]], scores: GroupScores
    ) -> None:
        """Score each rollout without a failure alone, and store in `scores` why some of the calls fail.

        After three calls that took more than REWARDER_TIMEOUT_S, others may take a tenth of it: a group
        of endless completions would hold its process too long.
        """
        late = 0
        for index in scores.healthy:
            limit_s = self.pool.timeout_s * (1.0 if late < _MOST_LATE else 0.1)
            try:
                self.pool.score(spec, _only(arguments, [index]), limit_s)
            except ScoringFailed as error:
                is_late = str(error).startswith(f"reward {spec.name}: {TOO_LONG}")
                alone = f"{error}; {_A_TENTH}" if is_late and late >= _MOST_LATE else str(error)
                late += is_late
                scores.failures[index] = alone[:SHOWN]
                self.failed.tell(alone, _ONE_FAILED, as_text(arguments["completions"][index]))

    def _check_without_completion(
        self, spec: RewardSpec, arguments: dict[str, list[Any]], found: ScoringFailed
    ) -> None:
        """Raise ScoringFailed if the reward fails for the completion `0` too: no completion is at fault.

        `0` is scored alone, with the other `arguments` of one completion, in a conversation as its only
        message. `found` is the failure of the whole group, which the error repeats.
        """
        harmless = arguments | {"completions": ["0"], "completion_ids": [[0]]}
        if "transcripts" in arguments:
            harmless["transcripts"] = [[{"role": "assistant", "content": "0"}]]
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
        """Return what rewards get of a group: by name, lists with one value per rollout.

        These are `prompts` (the column `prompt`, else the decoded prompt), the data's columns of other
        names than rewards' own arguments, `completions` (the `texts`), and `completion_ids`. If all
        rollouts are conversations, `transcripts` and `environment_reward` are there too. Raise
        MalformedMessage for a negative token id.
        """
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
        """Return the text of each array of token ids in `sequences`, in order, without special tokens.

        Raise MalformedMessage for a negative id.
        """
        numbers = [ids.tolist() for ids in sequences]
        try:
            return self.tokenizer.decode_batch(numbers, skip_special_tokens=True)
        except OverflowError as error:
            raise MalformedMessage(
                f"a token id of the group is negative ({error}), which no actor of Penstock sends: see "
                "who else writes to the queue server"
            ) from error


def answers_of(group: Group, texts: Sequence[str]) -> list[str]:
    """Return for each rollout the text that rewards read.

    Of a conversation that is the content of the assistant's last message, "" if there is no content. For
    other rollouts, and conversations without such a message, it is the decoded completion, of which
    `texts` has one per rollout.
    """
    answers = []
    for rollout, text in zip(group.rollouts, texts, strict=True):
        said = rollout.transcript.messages if rollout.transcript else ()
        own = [message for message in said if message.get("role") == "assistant"]
        answers.append(as_text(own[-1].get("content") or "") if own else text)
    return answers


def _transcripts(group: Group) -> dict[str, list[Any]]:
    """Return the arguments that rewards get of conversations; {} unless all rollouts are conversations.

    `transcripts` has each rollout's messages, copied, without the mark of a failed tool.
    `environment_reward` has the reward that its environment gave, None without one.
    """
    talks = [rollout.transcript for rollout in group.rollouts if rollout.transcript]
    if len(talks) < len(group.rollouts):
        return {}
    return {
        "transcripts": [[_in_trl(message) for message in talk.messages] for talk in talks],
        "environment_reward": [talk.reward for talk in talks],
    }


def _in_trl(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a transcript's message without the key that marks a failed tool."""
    return {name: value for name, value in message.items() if name != FAILED_TOOL}


def _state(spec: RewardSpec, group: Group) -> dict[str, list[Any]]:
    """Return {"trainer_state": the same map for each rollout} for a user's reward, {} for another.

    The map has `global_step`, the Updates before the ticket was first issued, and `max_steps`, those of
    the run (0 if unknown). A group has the same state whenever it is scored.
    """
    if not spec.source:
        return {}
    state = {"global_step": group.ticket.version.step, "max_steps": spec.options.get("max_steps", 0)}
    return {"trainer_state": [state] * len(group.rollouts)}


def _only(arguments: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
    """Return the arguments, as new lists, of the completions at `indices` alone, in that order."""
    return {name: [values[index] for index in indices] for name, values in arguments.items()}


def make_scorer(
    contract: Contract,
    pool: ScoringPool,
    name: str,
    find_tokenizer: Callable[[Contract], Path] = check_tokenizer,
) -> Scorer:
    """Return a scorer for `contract`, after each of its rewards was loaded in `pool` once.

    Of a judge its options and the key are checked instead. `name` is the rewarder's. `find_tokenizer`
    returns the folder with the tokenizer, and may fetch it from the learner. Raise
    ContractMismatch if a reward cannot be used here, or the contract's model folder is missing or has
    another tokenizer; ConfigError if the folder has none; SandboxFailed if no scoring process starts.
    """
    for spec in contract.rewards:
        if mistake := pool.check(spec):
            found = f"LEARNER_REWARDS: {spec.name} cannot be used here: {mistake}"
            raise ContractMismatch(f"{found}. Correct that on this host, or change LEARNER_REWARDS")
    folder = find_tokenizer(contract)
    return Scorer(contract, Tokenizer.from_file(str(folder / "tokenizer.json")), pool, name)


def _can_be_read(data: bytes) -> bool:
    """Return whether `data` is an encoded contract; if not, log an error with the reason."""
    try:
        decode(data, Contract)
    except MalformedMessage as error:
        log.error(shorten(f"The contract on the queue server cannot be read: {error}"))
        return False
    return True


class CurrentScorer:
    """The scorer of the contract in force, shared by all threads.

    `contract` is the first one, encoded; later ones are read through `view`. `pool` computes the
    rewards, `name` is the rewarder's, and `fetcher` gets a tokenizer that is not on this host. Creating
    it loads the rewards in the pool. Raise ContractMismatch, ConfigError or SandboxFailed if this
    process cannot serve the contract.
    """

    def __init__(
        self, view: RunView, pool: ScoringPool, name: str, contract: bytes, fetcher: ModelFetcher
    ) -> None:
        self._view = view
        self._find_tokenizer = fetcher.with_tokenizer
        self._pool = pool
        self._name = name
        self._changing = threading.Lock()
        self._scorer = self._make(contract)

    def for_group(self, group: Group) -> Scorer:
        """Return the scorer in force; for a group of another contract, read the contract again first.

        A new contract's rewards are loaded, while other threads wait here. If the contract is still the
        same, missing or unreadable, the group gets the scorer as before: the learner decides what
        becomes of its outcome. Raise ContractMismatch, ConfigError or SandboxFailed if this process
        cannot serve the new contract, RunNotReady, ServerUnavailable, or another error of
        Connection.execute.
        """
        with self._changing:
            if group.ticket.contract != self._scorer.contract.hash:
                self._adopt(self._view.contract())
            return self._scorer

    def rejoin(self, timeout_s: float, stopping: threading.Event) -> None:
        """Wait until a learner has published a contract, and use it from now on.

        If `stopping` is set first, change nothing. Raise DeadlineExceeded after `timeout_s` seconds
        without a contract and without a new heartbeat of a learner, MalformedMessage if the contract
        cannot be read for as long, RunNotReady if it changes meanwhile. Raise ContractMismatch,
        ConfigError or SandboxFailed if this process cannot serve the contract, ServerUnavailable, or
        another error of Connection.execute.
        """
        data = wait_for_contract(self._view, timeout_s, stopping)
        with self._changing:
            self._adopt(data)

    def _adopt(self, data: bytes | None) -> None:
        """Make the scorer of the encoded contract `data` the one in force, and log what changed.

        The rewards of the contract are loaded. Change nothing if `data` is None, in force already, or
        unreadable, which is logged as an error. Raise ContractMismatch, ConfigError or SandboxFailed if
        this process cannot serve the contract.
        """
        before = self._scorer.contract
        if data is not None and data != encode(before) and _can_be_read(data):
            self._scorer = self._make(data)
            log.info("The contract changed.", changes=describe_difference(before, self._scorer.contract))

    def _make(self, data: bytes) -> Scorer:
        """Return a scorer of the encoded contract `data`, whose rewards are loaded.

        Raise ContractMismatch if the contract cannot be read or served here, ConfigError if the model
        folder has no tokenizer.
        """
        try:
            return make_scorer(decode(data, Contract), self._pool, self._name, self._find_tokenizer)
        except MalformedMessage as error:
            raise ContractMismatch(
                f"the learner's contract cannot be read: {error}. "
                "Install the learner's release of penstock for this rewarder."
            ) from error
