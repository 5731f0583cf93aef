"""What never answers ends the run within its limit, with who and what was waited for."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import pytest

from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE, ROOT

pytestmark = pytest.mark.e2e

LIMIT_S = 15
BAD_REWARDS = ROOT / "tests" / "rewarders" / "bad_rewards.py"
PLUS = "13"  # a token that is in every question


@dataclass(frozen=True)
class Case:
    """What goes wrong: a process that is stopped, or variables; who says what, and the exit code.

    {pid} in the words is the process id of `culprit`, the one that is waited for.
    """

    culprit: str
    code: int
    words: tuple[str, ...]
    is_stopped: bool = False
    procfile: str = FAKE_PROCFILE
    variables: dict[str, str] = field(default_factory=dict)


CASES = {
    "a rewarder that is stopped": Case(
        "rewarder.1", 81,
        ("learner: DeadlineExceeded: no results for", " since ",
         "no rewarder is running, rewarder-", "-{pid}-"),
        is_stopped=True,
    ),
    "a reward that never answers": Case(
        "rewarder.1", 81,
        ("learner: DeadlineExceeded: no results for", ": rewarder-", "-{pid}-",
         " holds 1 group since "),
        variables={"LEARNER_REWARDS": f"{BAD_REWARDS}:hang", "REWARDER_TIMEOUT_S": "60"},
    ),
    "a reward that always raises": Case(
        "rewarder.1", 79,
        ("learner: NoSignal:", "Like this ticket, most died", "reward raise_error",
         "no such verifier", "reported by rewarder-", "-{pid}-"),
        variables={
            "LEARNER_REWARDS": f"{BAD_REWARDS}:raise_error", "LEARNER_MAX_RESAMPLE_TIMES": "0",
            "LEARNER_MAX_EMPTY_UPDATES": "1",
        },
    ),
    "an actor that is stopped": Case(
        "actor.1", 81,
        ("learner: DeadlineExceeded: no results for", " since ",
         "no actor is running, actor-", "-{pid}-"),
        is_stopped=True,
    ),
    "an actor whose engine hangs": Case(
        "actor.1", 81,
        ("learner: DeadlineExceeded: no results for", " actor-", "-{pid}-",
         " holds ", " since "),
        variables={"FAKE_POISON": PLUS, "FAKE_MISBEHAVIOUR": "hang"},
    ),
    "a learner that is stopped": Case(
        "learner.1", 81,
        (": DeadlineExceeded: no heartbeat from the learner for", "the learner is process {pid} (",
         "(incarnation 1, when last seen: ", "are announced; ", " since "),
        is_stopped=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_run_ends_within_its_limit_and_says_who_was_waited_for(name: str, tmp_path) -> None:
    case = CASES[name]
    site = ForkedSite(
        tmp_path, case.procfile, RUN_PROGRESS_TIMEOUT_S=str(LIMIT_S), RUN_LEASE_S="2",
        LEARNER_EVAL_DATASET="", LEARNER_MAX_STEPS="1000", FAKE_TOKEN_DELAY_S="0.02", **case.variables,
    )  # fmt: skip
    with site.start():
        if case.is_stopped:
            site.wait_for(lambda: site.steps() >= 1, "a step")
            os.kill(site.pid_of(case.culprit), signal.SIGSTOP)
        assert site.wait(600) == case.code, "\n".join(site.lines[-40:])
    said = [line for line in site.lines if case.words[0] in line]
    assert said, "\n".join(site.lines[-40:])
    pid = site.pid_of(case.culprit)
    for word in case.words:
        assert word.format(pid=pid) in said[0]
    assert not any("The run is complete" in line for line in site.lines)
