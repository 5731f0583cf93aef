"""The time to an accuracy, and watching a run that makes steps."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from benchmarks.time_to_reward import Timed, figures_of, watch


def test_the_time_to_an_accuracy_lies_between_two_checkpoints() -> None:
    timed = Timed(3.0, {1: 2.0, 25: 20.0, 50: 40.0}, {0: 0.4, 25: 0.5, 50: 0.7})
    assert timed.until(0.45) == pytest.approx(10.0)
    assert timed.until(0.6) == pytest.approx(30.0)
    assert timed.until(0.7) == pytest.approx(40.0)
    assert timed.until(0.71) == math.inf
    shown = figures_of(timed, (0.6,), 50)
    assert shown["seconds of training to 60%"] == pytest.approx(30.0)
    assert shown["seconds of training for 50 steps"] == 40.0
    assert shown["accuracy after 50 steps"] == 0.7


def test_steps_are_noted_when_they_are_seen(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import time\nfor step in range(4):\n    print('step', step, flush=True)\n    time.sleep(0.3)\n"
    )

    def progress() -> int | None:
        lines = log.read_text().splitlines()
        return int(lines[-1].split()[1]) if lines else None

    timed = watch([sys.executable, "-c", program], dict(os.environ), log, progress)
    assert sorted(timed.at_s) == [1, 2, 3]
    assert 0 < timed.at_s[1] < timed.at_s[2] < timed.at_s[3]
    assert timed.start_s > 0


def test_a_command_that_fails_is_shown_with_the_end_of_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('what happened'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="what happened"):
        watch(command, dict(os.environ), tmp_path / "log", lambda: None)
