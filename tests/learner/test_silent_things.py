"""Twelve things that a run used to do without a word: each is reported or refused now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.common.config.command import load
from penstock.common.config.misplaced import misplaced_values
from penstock.common.config.role_command import LearnerCommand
from penstock.common.errors import ConfigError
from penstock.common.wire.messages import Verdict
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.report.small_batches import SmallBatches
from penstock.learner.streams.intake import Arrivals
from tests.learner.builders import make_settings
from tests.learner.test_run_record import Home, other_model, other_rows, other_tokenizer


def restarted(change: Callable[[Home], None], begun: bool = True) -> Callable[[Path], str]:
    """What a second start says after `change`."""

    def start(folder: Path) -> str:
        home = Home(folder)
        home.start(begun=False)
        change(home)
        return "\n".join(home.start(begun))

    return start


def set_to(**values: Any) -> Callable[[Home], None]:
    """A change of settings."""
    return lambda home: home.changes.update(values)


def other_code(home: Home) -> None:
    home.rewards = (RewardSpec("accuracy"), RewardSpec("own", source="/own.py", digest="b" * 64))


def other_held_out(home: Home) -> None:
    questions = home.data.with_name("held-out.jsonl")
    questions.write_text('{"question": "2+2", "answer": "4"}\n')
    home.changes["eval_dataset"] = [str(questions)]


def warned(**values: Any) -> Callable[[Path], str]:
    """What the learner's start warns of with these settings."""
    return lambda _: "\n".join(misplaced_values(make_settings(**values)))


def flagged(*words: str) -> Callable[[Path], str]:
    """What these flags of `learner` are answered with."""

    def parse(folder: Path) -> str:
        load(LearnerCommand, "learner", ["--learner.model", str(folder), *words])
        return ""

    return parse


def small_steps(_: Path) -> str:
    """What three steps say that train 19 of 64 groups."""
    small = SmallBatches(64)
    verdict = Verdict("train:0", "filtered", "no spread", {}, ())
    with structlog.testing.capture_logs() as logs:
        for _step in range(3):
            small.add(19, Arrivals(filtered=[verdict] * 189))
            small.warn()
    return small.describe() + "\n".join(entry["event"] for entry in logs)


TWELVE: dict[str, tuple[Callable[[Path], str], str]] = {
    "another model": (restarted(other_model), "was started with another model"),
    "another tokenizer": (restarted(other_tokenizer), "was started with another tokenizer"),
    "other training questions": (restarted(other_rows), "was started with another dataset"),
    "another reward's code": (restarted(other_code), "the code or options of own"),
    "another setting": (restarted(set_to(learning_rate=3e-6)), "LEARNER_LEARNING_RATE was 1e-06"),
    "other held-out questions": (restarted(other_held_out), "LEARNER_EVAL_DATASET was empty"),
    "nothing to resume": (restarted(set_to(resume="must"), begun=False), "has no run with a step"),
    "a checkpoint for a learner alone": (
        restarted(set_to(resume="runs/x/checkpoints/000001-00000002")), "is for `penstock up`"
    ),
    "a misspelt name that is accepted": (
        flagged("--learner.accept-changed", "modle"), "did you mean model?"
    ),
    "gspo with ranges of tokens": (warned(loss_type="gspo"), "published with 0.0003"),
    "a beta without need": (warned(beta=1e-6), "needs a reference model"),
    "small batches": (small_steps, "trained 19 of 64 groups (189 of 208 had no spread)"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWELVE)
def test_it_is_reported_or_refused(name: str, tmp_path: Path) -> None:
    ask, words = TWELVE[name]
    try:
        said = ask(tmp_path)
    except ConfigError as error:
        said = str(error)
    assert words in said


def test_without_any_of_them_nothing_is_said(tmp_path: Path) -> None:
    assert restarted(lambda home: None)(tmp_path) == ""
    assert warned()(tmp_path) == ""
