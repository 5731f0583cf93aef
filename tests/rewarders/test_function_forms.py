"""Functions as people have them for TRL, ms-swift and verl, called in this process."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.rewarders.adapt import adapt
from penstock.rewarders.reward_process import apply_reward

COLUMNS = ["question", "answer", "prompt", "solution", "level"]
ARGUMENTS = {
    "prompts": ["1+1="] * 2, "completions": ["2", "33"], "completion_ids": [[1], [2, 3]],
    "question": ["1+1="] * 2, "answer": ["so 2"] * 2, "solution": ["2"] * 2, "level": [3] * 2,
    "trainer_state": [{"global_step": 1, "max_steps": 4}] * 2,
}  # fmt: skip


def values_of(found: object, form: str = "auto") -> tuple[float | None, ...]:
    return apply_reward(adapt(found, "own", form), ARGUMENTS, is_own=True).values


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


def right(solution_str, ground_truth, *, scale=1.0):
    return scale * (solution_str == ground_truth)


class Unit:
    def __init__(self, unit):
        self.unit = unit

    def __call__(self, prompts, completions, **kwargs):
        return [self.unit] * len(prompts)

    def score(self, completions):
        return [self.unit * len(text) for text in completions]

    @classmethod
    def of_class(cls, completions, **kwargs):
        return lengths(completions)

    @staticmethod
    def of_nobody(completion_ids, **kwargs):
        return lengths(completion_ids)


class Awaited:
    async def __call__(self, completions, *, level, **kwargs):
        await asyncio.sleep(0)
        return np.array(level) / 2


class ByPosition:
    """ms-swift passes the completions first, whatever the parameter is called."""

    def __call__(self, responses, solution, **kwargs):
        return [float(text == gold) for text, gold in zip(responses, solution, strict=True)]


class NeedsArgs:
    def __init__(self, *, args):
        self.args = args

    def __call__(self, completions, **kwargs):
        return [float(self.args is None)] * len(completions)


@dataclasses.dataclass
class Settled:
    unit: float = 2.5

    def __call__(self, completions, **kwargs):
        return [self.unit] * len(completions)


class LikeVerl:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "acc": True}


def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


async def side_by_side(solution_str, ground_truth, started=[]):  # noqa: B006
    """Wait until the other completion's call has begun too."""
    started.append(solution_str)
    async with asyncio.timeout(60):
        while len(started) % 2:
            await asyncio.sleep(0.001)
    return float(solution_str == ground_truth)


def sometimes_awaited(solution_str, ground_truth):
    return 0.5 if solution_str == ground_truth else side_by_side(solution_str, ground_truth, [1])


FORMS: dict[str, tuple[object, tuple[float | None, ...]]] = {
    "lambda": (lambda completions, **_: [len(text) for text in completions], (1, 2)),
    "completions alone": (lambda completions: [1, None], (1, None)),
    "none applies": (lambda completions, **_: [None, None], (None, None)),
    "generator": (lambda completions, **_: (len(text) for text in completions), (1, 2)),
    "map": (lambda completions, **_: map(len, completions), (1, 2)),
    "deque": (lambda completions, **_: collections.deque([1, 2]), (1, 2)),
    "dictionary's values": (lambda completions, **_: {"a": 1, "b": 2}.values(), (1, 2)),
    "array": (lambda completions, **_: np.array([1, 2], "float32"), (1, 2)),
    "numpy scalars": (lambda completions, **_: [np.float32(1), np.array([2])], (1, 2)),
    "truth values": (lambda completions, **_: [True, np.bool_(False)], (1, 0)),
    "keyword only": (lambda *, completions, level: level, (3, 3)),
    "default": (lambda completions, solution=None, extra=None: [extra is None, bool(solution)], (1, 1)),
    "extra positional": (lambda completions, *args, level=None, **_: level, (3, 3)),
    "trainer_state": (
        lambda trainer_state, **_: [trainer_state.global_step, trainer_state.max_steps],
        (1, 4),
    ),
    "ids as TRL's guide had them": (lambda completions_ids, **_: map(len, completions_ids), (1, 2)),
    "prompt": (lambda prompt, completions: [len(one) for one in prompt], (4, 4)),
    "gold as answer": (lambda completions, answer, **_: [a == "so 2" for a in answer], (1, 1)),
    "instance": (Unit(0.5), (0.5, 0.5)),
    "bound method": (Unit(0.5).score, (0.5, 1)),
    "class method": (Unit.of_class, (1, 2)),
    "static method": (Unit.of_nobody, (1, 2)),
    "partial": (functools.partial(lambda unit, completions, **_: [unit] * 2, 4.0), (4, 4)),
    "partial by name": (functools.partial(lambda completions, unit: [unit] * 2, unit=4.0), (4, 4)),
    "decorated": (decorated(lengths), (1, 2)),
    "async object": (Awaited(), (1.5, 1.5)),
    "async class": (Awaited, (1.5, 1.5)),
    "ms-swift by position": (ByPosition, (1, 0)),
    "ms-swift's args by name alone": (NeedsArgs, (1, 1)),
    "dataclass": (Settled, (2.5, 2.5)),
    "verl": (right, (1, 0)),
    "verl, partial": (functools.partial(right, scale=3.0), (3, 0)),
    "verl, decorated": (decorated(right), (1, 0)),
    "verl, class": (LikeVerl, (1, 0)),
    "verl, instance": (LikeVerl(), (1, 0)),
    "verl, no gold": (lambda solution_str, extra_info: len(solution_str) + len(extra_info), (1, 2)),
    "verl, any argument": (
        lambda solution_str, **given: float({*given} == {"data_source", "ground_truth", "extra_info"}),
        (1, 1),
    ),
    "verl, a column by its name": (lambda solution_str, ground_truth, *, level: level, (3, 3)),
    "verl, None": (lambda solution_str, ground_truth: None, (None, None)),
    "verl, list score": (lambda model_output, ground_truth: [0.5, "reason"], (0.5, 0.5)),
    "verl, numpy in a map": (lambda model_output, ground_truth: {"score": np.float64(2)}, (2, 2)),
    "verl, side by side": (side_by_side, (1, 0)),
    "verl, sometimes awaited": (sometimes_awaited, (0.5, 0)),
    "verl, batch of arrays": (lambda solution_strs, ground_truths: np.array([1, 2]), (1, 2)),
    "verl, batch with any argument": (
        lambda solution_strs, **given: [(float(sorted(given)[0] == "data_sources"), "x")] * 2,
        (1, 1),
    ),
    "pair": (lambda response, ground_truth: response == ground_truth, (1, 0)),
    "alone": (lambda completion: 1.0 if completion else 0.0, (1, 1)),
    "pair, answer is the gold answer": (lambda completion, answer: completion == answer, (1, 0)),
    "pair, a column by its name": (lambda completion, level: level, (3, 3)),
    "pair, the prompt": (lambda text, prompt: len(prompt), (4, 4)),
    "pair, keyword only": (lambda text, answer, *, level: level, (3, 3)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_function_is_called_as_its_framework_calls_it(name: str) -> None:
    found, values = FORMS[name]
    assert adapt(found, "own").missing(COLUMNS) == []
    assert values_of(found) == values


def logging_plain(completion, answer, log_extra, log_metric=None):
    log_extra("seen", completion + answer)
    log_metric("letters", len(completion))
    if completion == "33":
        log_extra("long", [completion])
    return 1.0


async def logging_verl(solution_str, ground_truth, *, log_extra, log_metric):
    await asyncio.sleep(0)
    return logging_plain(solution_str, ground_truth, log_extra, log_metric)


def logging_alone(completion, log_extra, log_metric):
    return logging_plain(completion, "2", log_extra, log_metric)


@pytest.mark.parametrize("found", [logging_plain, logging_verl, logging_alone])
def test_a_function_of_one_completion_logs_for_its_group(found: object) -> None:
    scores = apply_reward(adapt(found, "own"), ARGUMENTS, is_own=True)
    assert scores.values == (1.0, 1.0)
    assert scores.extra == {"seen": ("22", "332"), "long": (None, ["33"])}
    assert scores.metrics == {"letters": 1.5}


def test_a_function_of_one_completion_may_be_called_without_logs() -> None:
    assert adapt(logging_plain, "own")(**ARGUMENTS) == [1.0, 1.0]


def test_scalars_of_torch_are_numbers() -> None:
    torch = pytest.importorskip("torch")
    assert values_of(lambda completions, **_: torch.tensor([1.0, 2.0], requires_grad=True)) == (1, 2)
    assert values_of(lambda completions, **_: [torch.tensor(1.0), torch.tensor([2.0])]) == (1, 2)
    assert values_of(lambda solution_strs, ground_truths: torch.tensor([1, 2])) == (1, 2)


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (lambda completions, depth: ..., ["depth"]),
        (lambda solution_str, ground_truth, reward_router_address: ..., ["reward_router_address"]),
        (lambda solution_strs, ground_truths, *, extra: ..., ["extra"]),
        (lambda completion, answer, *, strict: ..., ["strict"]),
        (ByPosition, []),
        (lambda solution_str, ground_truth=None: ..., []),
    ],
)
def test_what_a_function_of_each_form_requires_is_known(found: object, missing: list[str]) -> None:
    assert adapt(found, "own").missing(COLUMNS) == missing


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda completions, **_: {1.0, 2.0}, "expected a list of 2 values"),
        (lambda completions, **_: "12", "expected a list of 2 values"),
        (lambda completions, **_: {"a": 1, "b": 2}, "expected a list of 2 values"),
        (lambda completions, **_: 1.0, "expected a list of 2 values"),
        (lambda completions, **_: [1.0], "expected a list of 2 values"),
        (lambda completions, **_: [[0.5], [0.5]], "expected finite numbers or None"),
        (lambda completions, **_: ["1", "2"], "expected finite numbers or None"),
        (lambda completions, **_: [float("nan"), 1.0], "expected finite numbers or None"),
        (lambda solution_str, ground_truth: {"acc": 1.0}, "expected a map with `score`, found one with"),
    ],
)
def test_what_is_no_list_of_numbers_is_no_reward(found: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        values_of(found)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (type("Empty", (), {}), "is a class without __call__"),
        (lambda predicted, wanted: 1.0, "is of no known form"),
        (lambda: [], "is of no known form"),
    ],
)
def test_what_has_no_known_form_is_refused(found: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapt(found, "own")


def test_a_function_is_tried_with_the_form_of_the_settings() -> None:
    def own(completions: list[Any], **_: Any) -> list[float]:
        return [float(isinstance(one, list)) for one in completions]

    row = {"question": "1+1=", "answer": "2", "completions": ["2"]}
    for form, value in (("messages", 1.0), ("text", 0.0), ("auto", 0.0)):
        (scores,) = penstock.try_reward(own, [row], LearnerSettings(reward_completions=form))
        assert scores.values == (value,)


def test_a_function_may_be_called_as_a_reward_of_penstock() -> None:
    def soft_overlong(completions: list[str], **_: Any) -> list[float]:
        return lengths(completions)

    def accuracy(completions: list[str], **_: Any) -> list[float]:
        return lengths(completions)

    row = {"question": "1+1=", "completions": ["2"]}
    for own in (soft_overlong, accuracy):  # neither LEARNER_SOFT_CACHE_LENGTH nor a gold answer
        assert penstock.try_reward(own, [row])[0].values == (1.0,)
