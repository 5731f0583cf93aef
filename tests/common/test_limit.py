"""The sentence on what limits a run, and the screen around it."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from penstock.common.broker.process_status import LearnerProgress, WorkerStatus
from penstock.common.broker.run_view import LearnerStatus
from penstock.common.log import is_coloured
from penstock.common.monitor.limit import Fault, LimitWatch, gain_of_one_more
from penstock.common.monitor.overview import Overview
from penstock.common.monitor.screen import duration, process_row, render, sparkline
from penstock.common.monitor.snapshot import StreamStatus
from penstock.common.monitor.watch import progress_line
from tests.common.test_terminals import EVERYTHING

NOW = 1_000_000_000_000


def worker(role: str = "actor", age_ms: int = 500, busy: float = 0.98, **other: Any) -> WorkerStatus:
    """A process that was last seen `age_ms` ago."""
    phase = "generating" if role == "actor" else "scoring"
    return WorkerStatus(role, "host", NOW - age_ms, "1.37", phase, busy, 5321.0, **other)  # type: ignore[arg-type]


PROGRESS = LearnerProgress(
    NOW, 37, 100, tuple(0.4 + step / 200 for step in range(37)), (0, 25), (0.44, 0.61), 0.93,
    step_s=1.0, wait_s=0.61, tokens_per_s=5321.0, trained=64, asked=64,
)  # fmt: skip


def streams(**depths: tuple[int, int]) -> dict[str, StreamStatus]:
    """Streams by name, of (entries, of which held)."""
    names = ("tickets", "eval_tickets", "rollouts", "scored", "evaluated")
    found = {name: depths.get(name, (0, 0)) for name in names}
    return {
        name: StreamStatus(name, depth, held, depth - held, 1.0, (), *(("actor-1", 1.0) if held else ()))
        for name, (depth, held) in found.items()
    }


RUNNING = Overview(
    run="demo", server="unix:///queue.sock", state="running", now_ms=NOW,
    learner=LearnerStatus("process 4711 on vm", 1, "1", "waiting for groups"), heartbeat_s=0.4,
    version="1.37", progress=PROGRESS,
    workers={"actor-1": worker(), "rewarder-1": worker("rewarder", busy=0.3)},
    streams=streams(tickets=(120, 64)), totals={"issued": 3000, "trained": 2368, "filtered": 0},
    folder="runs/demo",
)  # fmt: skip


def phase(name: str) -> dict[str, Any]:
    """A learner in this phase."""
    return {"learner": replace(RUNNING.learner, phase=name)}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "actors": (
        {}, "waits 61% of each step for groups: actors are the limit. One more would give about +100%"
    ),
    "rewarders that come next": (
        {"workers": {"a": worker(), "r": worker("rewarder", busy=0.8)}},
        "One more would give about +25%, on cores or a device of its own; then rewarders are the limit."
    ),
    "the learner": (
        {"progress": replace(PROGRESS, wait_s=0.07), "workers": {"a": worker(busy=0.6)}},
        "The learner is the limit: it waits 7% of each step for groups, and actors wait 40% of",
    ),
    "rewarders": (
        {
            "streams": streams(rollouts=(40, 4)),
            "workers": {"a": worker(busy=0.5), "r": worker("rewarder")},
        },
        "rewarders are the limit, with 40 groups to score. Add one with `queues scale runs/demo "
        "rewarder=2`, or raise REWARDER_WORKERS.",
    ),
    "rewarders that hold all": (
        {
            "streams": streams(rollouts=(3, 3)),
            "workers": {"a": worker(busy=0.0), "r": worker("rewarder")},
        },
        "rewarders are the limit, with 3 groups to score.",
    ),
    "rewarders that were busy and have no more": (
        {
            "streams": streams(rollouts=(0, 0)),
            "workers": {"a": worker(busy=0.0), "r": worker("rewarder")},
        },
        "the longest answers are the limit, or LEARNER_MAX_STALENESS.",
    ),
    "an evaluation": (
        {"streams": streams(eval_tickets=(193, 64))},
        "The learner waits for an evaluation: 193 questions left.",
    ),
    "after the last step": (
        {
            "progress": replace(PROGRESS, step=PROGRESS.steps),
            "streams": streams(rollouts=(67, 4)),
            "workers": {"a": worker(), "r": worker("rewarder")},
        },
        "All steps are made: the last evaluation and the final model are being finished.",
    ),
    "groups that die": (
        {"totals": {"issued": 90, "trained": 8, "dead": 55, "evaluated": 900}},
        "55 of 63 groups died: a reward, a tool or the prompts fail. `queues dead runs/demo` says why.",
    ),
    "the first step": (
        {"progress": None},
        "The learner waits 100% of each step for groups: actors are the limit so far.",
    ),
    "long answers": (
        {"workers": {"a": worker(busy=0.3), "r": worker("rewarder", busy=0.2)}},
        "actors wait 70% of their time",
    ),
    "no actor yet": (
        {"workers": {}, "progress": None},
        "The first actor has not joined yet: vLLM takes a minute to start.",
    ),
    "no rewarder yet": (
        {"workers": {}, "progress": None, "streams": streams(rollouts=(2, 0))},
        "The first rewarder has not joined yet; 2 groups to score.",
    ),
    "an actor that is gone": (
        {"folder": "/my x", "workers": {"actor-1": worker(age_ms=14_000), "r": worker("rewarder")}},
        "No actor is running (actor-1 was last seen 14 s ago): start one with `queues scale '/my x' "
        "actor=1`, elsewhere with `penstock up --only actor`, or `actor`.",
    ),
    "a rewarder that is gone": (
        {
            "workers": {"a": worker(), "r-1": worker("rewarder", 9_000)},
            "streams": streams(rollouts=(1, 1)),
        },
        "No rewarder is running (r-1 was last seen 9 s ago), and 1 group waits to be scored: start",
    ),
    "a learner without a heartbeat": (
        {"heartbeat_s": 12.0}, "No heartbeat from the learner for 12 s: process 4711 on vm is stopped"
    ),
    "a learner that left": (phase("leaving"), "No learner runs. Nothing is lost: start it again"),
    "a full disk": (
        phase("waiting for room on the disk"), "The learner waits for room on the disk with the run's"
    ),
    "a server that writes nothing": (
        {"server_fault": "The queue server is full."}, "The queue server is full."
    ),
    "a start": (
        {"version": "", **phase("reading data and model")}, "The learner starts (it is reading data and"
    ),
    "the end": ({"state": "ended"}, "The run has ended."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_sentence_names_the_cause(name: str) -> None:
    changes, words = CASES[name]
    sentence = LimitWatch().describe(replace(RUNNING, **changes))
    assert words in sentence
    works = (
        "actors", "the learner", "rewarders", "rewarders that come next", "rewarders that hold all",
        "long answers", "the first step", "no actor yet", "no rewarder yet", "a start", "the end",
        "an evaluation", "after the last step", "rewarders that were busy and have no more",
    )  # fmt: skip
    assert isinstance(sentence, Fault) == (name not in works)
    missing = {
        "an actor that is gone": "actor", "a rewarder that is gone": "rewarder",
        "no actor yet": "actor", "no rewarder yet": "rewarder",
        "a learner without a heartbeat": "learner", "a learner that left": "learner",
    }  # fmt: skip
    assert getattr(sentence, "missing", "") == missing.get(name, "")


def test_groups_that_die_late_are_told_and_those_that_died_early_are_not() -> None:
    watch = LimitWatch()

    def said(trained: int, dead: int) -> str:
        return watch.describe(replace(RUNNING, totals={"trained": trained, "dead": dead}))

    assert "died" not in said(10_000, 0)
    assert "10 of 12 groups died" in said(10_002, 10)
    assert "died" not in said(10_030, 10)
    assert "died" not in said(3, 0), "the server was emptied"
    assert "5 of 8 groups died" in said(3, 5)


def test_without_new_steps_the_share_is_that_of_the_last_looks() -> None:
    """A step that takes long has no figures yet: what the learner does at each look counts."""
    old = replace(RUNNING, progress=replace(PROGRESS, at_ms=NOW - 60_000))
    watch = LimitWatch()
    assert "waits 100%" in watch.describe(old)
    assert "waits 50%" in watch.describe(replace(old, **phase("running forward")))
    assert "waits 33%" in watch.describe(replace(old, **phase("running backward")))


@pytest.mark.parametrize(
    ("actors", "waiting", "scoring", "gain"),
    [
        (1, 0.3, 0, 0.43),
        (1, 0.61, 0.5, 1),
        (3, 0.61, 0, 0.33),
        (3, 0, 0, 0),
        (1, 0.61, 0.8, 0.25),
        (1, 1, 1, 0),
    ],
)
def test_the_gain_ends_where_learner_or_rewarders_are_the_limit(
    actors: int, waiting: float, scoring: float, gain: float
) -> None:
    assert gain_of_one_more(actors, waiting, scoring) == pytest.approx(gain, abs=0.005)


def shown(now: Overview | None, columns: int, lines: int, **console: Any) -> list[str]:
    """The lines of the screen."""
    file = io.StringIO()
    made = Console(file=file, width=columns, height=lines, **console)
    sentence = LimitWatch().describe(now) if now else "Waiting."
    made.print(render(now, sentence, ["a line"] * 50, columns, lines))
    return file.getvalue().splitlines()


@pytest.mark.parametrize(("columns", "lines"), [(100, 30), (80, 24), (200, 60)])
def test_the_screen_fits(columns: int, lines: int) -> None:
    many = {f"actor-host-{n}": worker(age_ms=10_000 * (n % 2)) for n in range(40)}
    for now in (RUNNING, replace(RUNNING, workers=many), replace(RUNNING, progress=None), None):
        found = shown(now, columns, lines)
        assert len(found) <= lines
        assert all(len(line) <= columns for line in found)
    text = "\n".join(shown(RUNNING, columns, lines))
    for words in (
        "step 37 of 100", "1.00 s a step, 63 s left", "reward     0.580", "held-out   0.610",
        "last at step 25", "56 tickets > 1 actor (64) > 0 groups > 1 rewarder (0)", "staleness 0.93",
        "2368 trained", "5,321 tokens/s", "actors are the limit", "a line",
    ):  # fmt: skip
        assert words in text
    assert "oldest ticket 1 s (held by actor-1)" in " ".join(text.split())
    assert "filtered" not in text  # nothing was
    crowded = shown(replace(RUNNING, workers=many), 80, 24)
    assert any("and 3" in line and "more" in line for line in crowded)


@pytest.mark.parametrize(("columns", "lines"), [(20, 5), (40, 10), (1, 1)])
def test_a_small_terminal_shows_the_sentence(columns: int, lines: int) -> None:
    text = " ".join(shown(RUNNING, columns, lines))
    assert text.replace(" ", "").startswith("Thelearnerwaits61%")


def test_a_process_with_older_weights_says_how_old() -> None:
    versions = {"new": "1.37", "old": "1.34", "ahead": "1.38", "strange": "x", "none": ""}
    statuses = {name: replace(worker(), version=version) for name, version in versions.items()}
    now = replace(RUNNING, workers=statuses)
    found = {name: process_row(now, name)[2] for name in versions}
    assert found == versions | {"old": "1.34 (-3)"}


def test_hostile_names_are_escaped() -> None:
    hostile = EVERYTHING + "[bold]\x1b[2J"
    now = replace(RUNNING, run=hostile, workers={hostile: worker()}, **phase(hostile))
    text = "".join(shown(now, 100, 30))
    assert "\x1b" not in text
    assert "[bold]" in text


def test_without_colour_nothing_is_coloured(monkeypatch) -> None:
    assert "\x1b[" in "".join(shown(RUNNING, 100, 30, force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    plain = "".join(shown(RUNNING, 100, 30, force_terminal=True))
    assert not any(f"\x1b[{code}m" in plain for code in (31, 32, 33, 34, 35, 36))


@pytest.mark.parametrize(
    ("variable", "value", "coloured"),
    [("TERM", "xterm", True), ("TERM", "dumb", False), ("NO_COLOR", "1", False)],
)
def test_colours_are_for_terminals_that_want_them(monkeypatch, variable, value, coloured) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, value)
    terminal = io.StringIO()
    assert not is_coloured(terminal)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert is_coloured(terminal) is coloured


def test_a_sparkline_has_a_letter_per_value() -> None:
    assert sparkline((0.0, 0.5, 1.0), 10) == "▁▅█"
    assert sparkline((0.7, 0.7), 10) == "▄▄"
    assert sparkline((1e308, -1e308), 10) == "▄▄"  # their difference is infinite
    assert sparkline((0.0, math.nan, 1.0), 2) == " ▄"
    assert sparkline(range(100), 5) == "▁▃▅▇█"
    assert sparkline((), 10) == ""


def test_a_terminal_without_unicode_gets_other_letters() -> None:
    """In a thread an error of the encoding would end the screen."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=100, height=30)
    console.print(render(RUNNING, "A sentence.", (), 100, 30, console.encoding))
    file.flush()
    text = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "_._" in text or "__" in text
    assert "@" in text


def test_times_are_for_people() -> None:
    found = [duration(seconds) for seconds in (0, 99, 100, 7200, 400_000)]
    assert found == ["0 s", "99 s", "2 min", "2.0 h", "4.6 d"]


def test_one_line_has_the_step_and_the_cause() -> None:
    assert progress_line(RUNNING, "Cause.") == (
        "step 37 of 100, reward 0.580, held-out 0.610, 63 s left. Cause."
    )
    assert progress_line(None, "Cause.") == "Cause."
