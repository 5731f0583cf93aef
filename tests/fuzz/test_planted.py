"""Faults that are planted in the product, one check taken out at a time: the fuzz must see each.

Every message here is accepted and wrong once its check is gone, and refused while the check is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from penstock.actors import engine
from penstock.common.errors import MalformedMessage
from penstock.common.wire import messages
from penstock.learner.streams.intake import Intake
from penstock.learner.streams.refusal import OutcomeCheck
from tests.fuzz import consumers
from tests.fuzz.cases import MessageCases
from tests.fuzz.consumers import OUTSIDE
from tests.fuzz.edits import Message
from tests.fuzz.packing import to_bytes
from tests.fuzz.run import log_nothing, memory_folder
from tests.fuzz.valid import NO_WEIGHTS, WEIGHTS


@dataclass(frozen=True)
class Plant:
    """Changes of one valid message, and the check that is taken out: the text or reason it gives.

    `second` is the check that would still refuse it, where the learner looks twice.
    """

    sample: str
    changes: dict[str, Any]
    check: str
    second: str = ""


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def _ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


GROUP, EVAL_GROUP, VERDICT = "ScoredGroup to intake", "ScoredGroup to evaluation", "Verdict to intake"
FIRST, TICKET = "group.rollouts.0", "group.ticket"

PLANTED = [
    # of the messages themselves
    Plant(GROUP, {f"{FIRST}.logprobs": _floats(-1, -1, 0.5, -1, -1)}, "expected log-probabilities"),
    Plant(GROUP, {f"{FIRST}.logprobs": _floats(-1, -1, np.nan, -1, -1)}, "expected log-probabilities"),
    Plant(GROUP, {f"{FIRST}.logprobs": _floats(-1, -1, -3e38, -1, -1)}, "expected log-probabilities"),
    Plant(GROUP, {f"{FIRST}.mask": b"\x01" * 4}, "mask entries", "expected a span within"),
    Plant(GROUP, {f"{FIRST}.spans.1.start": 1}, "expected a span within"),
    Plant(GROUP, {f"{FIRST}.spans.1.start": 3}, "sampled, but in no span"),
    Plant(GROUP, {f"{FIRST}.spans.1.end": 4}, "sampled, but in no span"),
    Plant(GROUP, {f"{FIRST}.mask": b"\x01\x00\x01\x01\x01"}, "in a span, but not", "episode"),
    Plant(GROUP, {"rewards.accuracy.0": 1e100}, "expected a finite number"),
    Plant(GROUP, {"rewards.accuracy": [1.0, 0.0]}, "values for 3 completions"),
    Plant(GROUP, {"rewards.accuracy.2": 1.0}, "failed, expected no rewards"),
    Plant(GROUP, {"texts": ["12", "a"]}, "expected 3 texts"),
    Plant(GROUP, {"metrics.letters": np.inf}, "metric letters"),
    Plant(GROUP, {"extra.note": ["a"]}, "extra column"),
    Plant(VERDICT, {"rewards": {name: [0.0, 0.0] for name in WEIGHTS}, "lengths": []}, "fits"),
    Plant(VERDICT, {"lengths": [3, 2**64 - 1, 2]}, "length", "fits"),
    Plant(VERDICT, {"reason": "x" * 70_000}, "a text has"),
    # of the learner, against the ticket as issued
    Plant(GROUP, {f"{TICKET}.columns": {"prompt": "9+1=", "solution": "11"}}, "columns"),
    Plant(GROUP, {f"{TICKET}.prompt_ids": _ints(3, 4, 6)}, "prompt"),
    Plant(GROUP, {f"{TICKET}.sampling.temperature": 0.5}, "sampling"),
    Plant(GROUP, {f"{TICKET}.sampling.seed": 7}, "sampling"),
    Plant(GROUP, {f"{TICKET}.contract": "0" * 16}, "contract"),
    Plant(GROUP, {f"{TICKET}.id": "train:8"}, "ticket"),
    Plant(GROUP, {f"{TICKET}.min_step": 0}, "issue"),
    Plant(GROUP, {f"{TICKET}.version": [1, 3]}, "issue"),
    Plant(GROUP, {f"{FIRST}.spans.0.version": [2, 3]}, "version"),
    Plant(GROUP, {f"{FIRST}.spans.0.version": [1, 2**40]}, "version"),
    Plant(GROUP, {f"{FIRST}.spans.0.hash": "00" * 32}, "hash"),
    Plant(GROUP, {f"{FIRST}.token_ids": _ints(1, 2, 3, 4, 32)}, "tokens"),
    Plant(GROUP, {"rewards": {"accuracy": [1.0, 0.0, None]}}, "rewards"),
    Plant(VERDICT, {"ticket_id": "train:8"}, "ticket"),
    Plant(EVAL_GROUP, {f"{TICKET}.id": "eval:1.2:0"}, "ticket"),
    Plant(EVAL_GROUP, {f"{TICKET}.prompt_ids": _ints(3, 4)}, "prompt"),
    Plant(EVAL_GROUP, {f"{TICKET}.sampling.temperature": 1.0}, "sampling"),
    Plant(EVAL_GROUP, {f"{TICKET}.columns": {"solution": "2"}}, "columns"),
    Plant(EVAL_GROUP, {f"{FIRST}.spans.0.version": [1, 2]}, "version"),
]


@pytest.fixture(scope="module")
def cases():
    with memory_folder() as folder:
        yield MessageCases(1, folder)


@pytest.fixture(autouse=True)
def quiet():
    log_nothing()


def judge(cases: MessageCases, plant: Plant) -> tuple[str, Any]:
    """What the fuzz says of the planted message."""
    sample = next(one for one in cases.samples if f"{one.name} to {one.consumer}" == plant.sample)
    message = Message(sample.tree)
    for name, value in plant.changes.items():
        message.put(name, value)
    return cases.judge(sample, to_bytes(message.tree), "planted")


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: f"{plant.sample}: {plant.check}")
def test_a_check_that_is_missing_is_noticed(cases, plant, monkeypatch):
    what, fault = judge(cases, plant)
    assert what.split()[1] in ("dead", "stale", "filtered")
    assert fault is None
    for check in filter(None, (plant.check, plant.second)):
        take_out(check, monkeypatch)
    assert judge(cases, plant)[1] is not None


def take_out(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out the learner's comparison of this reason, and every message's check that says this."""
    for name in [name for name in vars(messages) if name == "require" or name.startswith("check_")]:
        monkeypatch.setattr(messages, name, _without(check, getattr(messages, name)))
    compare = OutcomeCheck.why_refused

    def why_refused(self: OutcomeCheck, *arguments: Any) -> Any:
        found = compare(self, *arguments)
        return None if found == check else found

    monkeypatch.setattr(OutcomeCheck, "why_refused", why_refused)
    if check == "fits":
        monkeypatch.setattr(Intake, "_fits", lambda *_: True)


def _without(text: str, check: Callable[..., None]) -> Callable[..., None]:
    def checked(*arguments: Any, **named: Any) -> None:
        try:
            check(*arguments, **named)
        except MalformedMessage as error:
            if text not in str(error):
                raise

    return checked


@pytest.mark.parametrize("changes", [{"path": "/etc"}, {"version": [1, 4]}])
def test_weights_from_elsewhere_are_noticed(cases, changes, monkeypatch):
    plant = Plant("Weights to weights", changes, "")
    assert judge(cases, plant)[1] is None
    elsewhere = cases.consumers.folder.path / OUTSIDE
    monkeypatch.setattr(
        consumers, "find_weights", lambda weights, _: replace(weights, path=str(elsewhere))
    )
    monkeypatch.setattr(engine, "hash_weights", lambda _: NO_WEIGHTS)
    assert judge(cases, plant)[1] is not None


def test_a_ticket_that_is_lost_is_noticed(cases, monkeypatch):
    monkeypatch.setattr(Intake, "_end_dead", lambda *_: None)
    plant = Plant(GROUP, {"texts": []}, "")
    assert "neither held nor ended" in judge(cases, plant)[1].what
