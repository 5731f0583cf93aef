"""The demo's run with an exact lag, in one process: every batch is sampled `lag` versions ago.

Task, base model, tickets, scoring, batches and Updates are the product's. Queues and vLLM are left out,
because with them the lag would depend on timing: the sampler is a plain one in torch, and has the
weights that the learner had `lag` Updates before.

Dimensions: B prompts, P tokens of a prompt, N completions, V words of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from dotenv import dotenv_values
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.log import get_logger
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import FinishReason, Group, Rollout, ScoredGroup, Span, Ticket
from penstock.common.wire.reward_spec import RewardSpec
from penstock.deploy.demo.base_model import make_base_model
from penstock.deploy.demo.task import write_task
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.data.plan import Plan, make_plan
from penstock.learner.policy.deepspeed_engine import leave_process_group
from penstock.learner.policy.policy import Policy
from penstock.learner.policy.update import Update
from penstock.rewarders.reward_process import Scores
from penstock.rewarders.rewards.accuracy import accuracy
from penstock.rewarders.scoring import make_scorer
from penstock.rewarders.scoring_pool import ScoringPool

log = get_logger(__name__)

RECIPE = Path(__file__).parents[1] / "deploy" / "recipes" / "demo.env"
TASK_SEED = 1
MOST_ROUNDS = 12
"""Rounds of sampling for one batch; a policy that gets all right or all wrong would need no end."""

State = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """What one run came to; per-step values are means over its Updates."""

    accuracy: dict[int, float]
    """Held-out, greedy, after so many Updates."""
    groups_trained: int
    """Over the whole run."""
    staleness: float
    """Of a trained token, in versions."""
    log_ratio: float
    """Mean of |log(policy now / policy that sampled)| over trained tokens, at each first pass."""
    clipped: float
    """Share of tokens whose gradient the clipping (or the trust region) takes away."""
    bounded: float
    """Share of tokens whose ratio the correction cuts or masks."""
    reward: float
    """Mean of the trained groups' rewards."""


def train_arm(
    folder: Path,
    lag: int,
    changes: Mapping[str, Any],
    seed: int,
    steps: int,
    groups: int,
    eval_steps: int,
) -> Run:
    """A run of the demo's recipe with changes, on one core; what `folder` lacks is made first."""
    torch.set_num_threads(1)
    sizes = {"max_staleness": lag, "groups_per_step": groups, "seed": seed}
    settings = recipe_settings(**(_world(folder) | sizes | dict(changes)))
    return train(settings, lag=lag, steps=steps, eval_steps=eval_steps)


def leave() -> None:
    """After the last run: without it the process ends in SIGABRT."""
    leave_process_group()


def recipe_settings(**changes: Any) -> LearnerSettings:
    """The demo recipe's, with changes."""
    found: dict[str, Any] = {
        name.removeprefix("LEARNER_").lower(): value
        for name, value in dotenv_values(RECIPE).items()
        if name.startswith("LEARNER_")
    }
    return LearnerSettings(**(found | changes))


@lru_cache(maxsize=1)
def _world(folder: Path) -> dict[str, str]:
    """The demo's data set and base model, made at the first call; as settings that name them."""
    task = write_task(folder / "task", TASK_SEED)
    make_base_model(folder / "base", task, TASK_SEED, lambda line: log.info("base model", at=line))
    return {"model": str(folder / "base"), "dataset": str(task.train), "eval_dataset": str(task.heldout)}


def train(settings: LearnerSettings, *, lag: int, steps: int, eval_steps: int) -> Run:
    """One run. Versions 0 to `lag` are trained on what version 0 sampled, as at a real run's start."""
    plan = make_plan(settings)
    policy = Policy(plan.model_folder, settings, steps)
    site = Site(plan, settings)
    versions: deque[State] = deque(maxlen=lag + 1)
    accuracy, updates, rewards, groups = {}, [], [], 0
    for step in range(steps):
        versions.append(copy_state(policy))
        if step % eval_steps == 0:
            accuracy[step] = site.accuracy(versions[-1], step)
        scored = site.take_groups(versions[0], max(0, step - lag))
        if not scored:
            continue  # nothing was right, or everything: such a policy has no signal left
        updates.append(policy.update(build_batch(scored, plan.reward_weights, step, settings), step))
        groups += len(scored)
        rewards.append(np.mean([group.rewards["accuracy"] for group in scored]))
    accuracy[steps] = site.accuracy(copy_state(policy), steps)
    return _summary(accuracy, groups, updates, rewards)


def _summary(
    accuracy: dict[int, float], groups: int, updates: Sequence[Update], rewards: Sequence[Any]
) -> Run:
    def mean(values: Iterator[Any]) -> float:
        return float(np.mean([value.mean() for value in values if value.size] or [0.0]))

    tokens = [update.tokens for update in updates]
    return Run(
        accuracy=accuracy,
        groups_trained=groups,
        staleness=mean(t.staleness for t in tokens),
        log_ratio=mean(np.abs(t.logprobs - t.behaviour)[t.first > 0] for t in tokens),
        clipped=mean(t.clipped_low + t.clipped_high for t in tokens),
        bounded=mean(t.bounded for t in tokens),
        reward=float(np.mean(rewards or [0.0])),
    )


def copy_state(policy: Policy) -> State:
    """The policy's weights as they are now."""
    return {name: value.detach().clone() for name, value in policy.model.state_dict().items()}


class Site:
    """Actor and rewarder of a run: tickets in, scored groups out."""

    def __init__(self, plan: Plan, settings: LearnerSettings) -> None:
        self._source = plan.source
        self._settings = settings
        self._sampler = Sampler(plan.model_folder, settings.seed)
        self._scorer = make_scorer(plan.contract, cast(ScoringPool, PlainPool()), "benchmark")
        self._numbers = count()

    def take_groups(self, weights: State, step: int) -> list[ScoredGroup]:
        """A batch's groups, all sampled with these weights, which are those of version `step`.

        Groups without spread are replaced, so that there are groups_per_step of them; fewer only if
        MOST_ROUNDS did not find as many.
        """
        self._sampler.load(weights)
        groups: list[ScoredGroup] = []
        for _ in range(MOST_ROUNDS):
            missing = self._settings.groups_per_step - len(groups)
            if not missing:
                break
            numbers = islice(self._numbers, missing)
            version = Version(1, step)
            tickets = [self._source.train(TicketId.train(number), version) for number in numbers]
            groups += self._score(tickets)
        return groups

    def accuracy(self, weights: State, step: int) -> float:
        """Share of the held-out questions that greedy decoding answers right."""
        self._sampler.load(weights)
        indices = range(len(self._source.eval_questions))
        tickets = [self._source.evaluation(Version(1, step), index) for index in indices]
        return float(np.mean([group.rewards["accuracy"] for group in self._score(tickets)]))

    def _score(self, tickets: Sequence[Ticket]) -> list[ScoredGroup]:
        outcomes = [self._scorer.score_group(group) for group in self._sampler.sample(tickets)]
        return [outcome for outcome in outcomes if isinstance(outcome, ScoredGroup)]


class PlainPool:
    """The rewarder's accuracy without its processes: an answer is a few digits, nothing to be feared."""

    def check(self, spec: RewardSpec) -> str:
        """As `ScoringPool.check`."""
        return ""

    def score(self, spec: RewardSpec, arguments: dict[str, list[Any]]) -> Scores:
        """As `ScoringPool.score`."""
        pairs = zip(arguments["completions"], arguments["solution"], strict=True)
        return Scores(tuple(_accuracy(text, gold) for text, gold in pairs))


@cache
def _accuracy(text: str, gold: str) -> float | None:
    return accuracy([""], [text], [gold])[0]


class Sampler:
    """Samples whole batches of equally long prompts, with a model and random numbers of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False
        ).eval()
        self._end = self._model.generation_config.eos_token_id
        self._random = torch.Generator().manual_seed(seed)

    def load(self, weights: State) -> None:
        """Sample with these from now on."""
        self._model.load_state_dict(weights)

    def sample(self, tickets: Sequence[Ticket]) -> list[Group]:
        """A group per ticket; the tickets ask for the same sampling but for its seed."""
        prompts_BP = torch.from_numpy(np.stack([ticket.prompt_ids for ticket in tickets])).long()
        size, sampling = tickets[0].num_generations, tickets[0].sampling
        tokens_NT, logprobs_NT = self._generate(
            prompts_BP, size, sampling.max_tokens, sampling.temperature
        )
        rollouts = [
            self._rollout(tokens, logprobs, tickets[index // size].version)
            for index, (tokens, logprobs) in enumerate(zip(tokens_NT, logprobs_NT, strict=True))
        ]
        return [
            Group(ticket, tuple(rollouts[start : start + size]), "benchmark")
            for ticket, start in zip(tickets, range(0, len(rollouts), size), strict=True)
        ]

    @torch.no_grad()
    def _generate(
        self, prompts_BP: Tensor, size: int, max_tokens: int, temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their log-probabilities, (B * size, T); what comes after an end means nothing."""
        output = self._model(input_ids=prompts_BP, use_cache=True)
        cache = output.past_key_values
        cache.batch_repeat_interleave(size)
        logits_NV = output.logits[:, -1].repeat_interleave(size, dim=0)
        tokens, logprobs = [], []
        ended_N = torch.zeros(len(logits_NV), dtype=torch.bool)
        while True:
            chosen_N, logprobs_N = self._choose(logits_NV, temperature)
            tokens.append(chosen_N)
            logprobs.append(logprobs_N)
            ended_N |= chosen_N == self._end
            if len(tokens) == max_tokens or ended_N.all():
                return torch.stack(tokens, 1).numpy(), torch.stack(logprobs, 1).numpy()
            output = self._model(input_ids=chosen_N[:, None], past_key_values=cache, use_cache=True)
            logits_NV = output.logits[:, -1]

    def _choose(self, logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """A token each, (N,), and its log-probability; the likeliest at temperature 0."""
        logprobs_NV = torch.log_softmax(logits_NV / (temperature or 1.0), dim=-1)
        if temperature:
            chosen_N1 = torch.multinomial(logprobs_NV.exp(), 1, generator=self._random)
        else:
            chosen_N1 = logprobs_NV.argmax(dim=-1, keepdim=True)
        return chosen_N1[:, 0], logprobs_NV.gather(1, chosen_N1)[:, 0]

    def _rollout(self, tokens_T: np.ndarray, logprobs_T: np.ndarray, version: Version) -> Rollout:
        ends = np.flatnonzero(tokens_T == self._end)
        length = int(ends[0]) + 1 if len(ends) else len(tokens_T)
        finish: FinishReason = "stop" if len(ends) else "length"
        return Rollout(
            token_ids=tokens_T[:length].astype("<i4"),
            logprobs=logprobs_T[:length].astype("<f4"),
            mask=np.ones(length, dtype="|b1"),
            spans=(Span(version, 0, length, ""),),
            finish_reason=finish,
        )
