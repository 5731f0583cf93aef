"""A whole run of forked processes that are started again when they die.

The roles are the real ones, on a real queue server; but the actors have the fake engine, the learner a
policy that hashes what it is trained on, and rewards are computed without a process of their own. All
are forked from one process that has imported everything: a start takes a moment.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - the learner imports it late: each fork would, for a second
import numpy as np

import penstock.actors.loop
import penstock.learner.start
import penstock.rewarders.loop
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.role_command import ActorCommand, LearnerCommand, RewarderCommand
from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings
from penstock.common.errors import NEVER_RESTARTED, PenstockError
from penstock.common.failpoint import Armed, arm
from penstock.common.files.run_folder import RunFolder
from penstock.common.role import stop_on_signals
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.state.best_model import read_best
from penstock.rewarders.reward_process import Scores
from penstock.rewarders.scoring_pool import ScoringFailed
from tests.crashes.policy import HashPolicy, final_weights, weights_by_the_journal
from tests.crashes.watch import Watch
from tests.e2e.site import make_model
from tests.fake_engine import FakeEngine
from tests.judge import judge, read_records

ROLES = ("learner", "actor", "rewarder")
POISON = 11
"""The engine refuses a prompt with this token, or does worse: one question has it."""
QUESTIONS = 12
HOPELESS = (4, 9)
"""The questions that the engine refuses, and whose reward always fails."""

BROKEN, SLOW = "broken", "slow"
"""Solutions of the questions whose reward always fails, and takes so long that its lease is renewed."""

SLOW_S = 0.8
STEPS = 6
_PDEATHSIG = 1
_ZOMBIE_SLEEPS = 4  # Updates
_LOOK_EVERY_S = 0.03
_ENDS_EVERY_S = 0.05  # so that an actor hands off several groups together
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run: faults as (kind, sentence), kinds being lost, twice, stuck, other weights."""

    faults: tuple[tuple[str, str], ...]
    deaths: Mapping[str, int]
    seconds: float

    @property
    def kinds(self) -> set[str]:
        """The kinds of its faults; none if the run is sound."""
        return {kind for kind, _ in self.faults}


class InlinePool:
    """Stands in for the pool of scoring processes."""

    def __init__(self, _settings: RewarderSettings) -> None:
        self.finished = 0

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""

    def check(self, _spec: RewardSpec) -> str:
        """Nothing is wrong with the reward."""
        return ""

    def score(self, _spec: RewardSpec, arguments: dict[str, list[Any]]) -> Scores:
        """One for a completion of even length; one question takes long, one cannot be scored."""
        self.finished += 1
        if SLOW in arguments["solution"]:
            time.sleep(SLOW_S)
        if BROKEN in arguments["solution"]:
            raise ScoringFailed("the reward is broken")
        evens = (len(text.replace(" ", "")) % 2 == 0 for text in arguments["completions"])
        return Scores(tuple(map(float, evens)))


@dataclass
class World:
    """One run in a folder of its own. `options` are the learner's settings.

    `armed` says where a role dies; with several places, each start of the role is armed with the next.
    `on_step` is called at each Update, to make trouble.
    """

    folder: Path
    armed: Mapping[str, Sequence[Armed]] = field(default_factory=dict)
    misbehaviour: str = "refuse"
    on_step: Callable[[World, int], None] = lambda _world, _step: None
    options: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 60.0
    lease_s: float = 2.0
    token_delay_s: float = 0.02

    def __post_init__(self) -> None:
        self.keys = Keys("crash")
        self.run_folder = self.folder / "runs" / "crash"
        self.pids: dict[str, int] = {}
        self.deaths = dict.fromkeys(ROLES, 0)
        self.stuck = ""
        self.zombie_code: int | None = None
        self._zombie_wakes_at = 0
        self._model = prepare_model(self.folder.parent)
        _write_questions(self.folder / "questions.jsonl")
        self.server = LocalServer(self.run_folder)

    def run(self) -> Verdict:
        """From the first process to the last, or until the limit."""
        began = time.monotonic()
        with self.server:
            self.watch = Watch(self.server.url, self.keys, self.run_folder)
            try:
                self._live(began + self.limit_s)
            finally:
                for pid in self.pids.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            faults = self._faults()
        return Verdict(tuple(sorted(faults)), self.deaths, time.monotonic() - began)

    def _live(self, deadline: float) -> None:
        for role in ROLES:
            self.start(role)
        step, over_at = 0, None
        while self.pids and not self.stuck:
            for role, code in self._reap():
                self.watch.look()
                if role == "learner" and code == 0:
                    over_at = time.monotonic()
                elif role == "zombie":
                    self.zombie_code = code
                elif code in NEVER_RESTARTED:
                    self.stuck = f"{role} ended with exit code {code}: {self._last_line(role)}"
                elif code != 0:
                    self.deaths[role] += 1
                    if over_at is None:
                        self.start(role)
            self.watch.look()
            now = time.monotonic()
            if over_at is not None and (self._have_fired() or now - over_at > _LEAVE_S):
                return
            if now > deadline:
                self.stuck = f"not over after {self.limit_s:g} s, at step {step}"
            while step < self.steps():
                step += 1
                self.on_step(self, step)
                self._wake_zombie(step)
            time.sleep(_LOOK_EVERY_S)

    def start(self, role: str) -> None:
        """Fork a role."""
        mains = {"learner": self._be_learner, "actor": self._be_actor, "rewarder": self._be_rewarder}
        armed = next((one for one in self.armed.get(role, ()) if not _has_fired(one)), None)
        pid = os.fork()
        if pid == 0:
            _become(mains[role], self.folder / f"{role}.log", armed)
        self.pids[role] = pid

    def steps(self) -> int:
        """Updates the run has recorded."""
        path = self.run_folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def _reap(self) -> list[tuple[str, int]]:
        ended = []
        for role, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self._supersede(role)
            elif found:
                del self.pids[role]
                ended.append((role, os.waitstatus_to_exitcode(status)))
        return ended

    def _supersede(self, role: str) -> None:
        """Another takes the place of one that was stopped, and that its lock does not keep off."""
        self.pids["zombie"] = self.pids.pop(role)
        (self.run_folder / "learner.lock").unlink()
        time.sleep(2 * self.lease_s)  # until its lease has run out
        self.start(role)
        self._zombie_wakes_at = self.steps() + _ZOMBIE_SLEEPS

    def _wake_zombie(self, step: int) -> None:
        if step == self._zombie_wakes_at and "zombie" in self.pids:
            os.kill(self.pids["zombie"], signal.SIGCONT)

    def _have_fired(self) -> bool:
        return all(_has_fired(one) for armed in self.armed.values() for one in armed)

    def _last_line(self, role: str) -> str:
        lines = (self.folder / f"{role}.log").read_text().splitlines()
        return lines[-1] if lines else ""

    # The roles, each in a process of its own

    @property
    def _run_settings(self) -> RunSettings:
        return RunSettings(
            name="crash",
            dir=self.folder / "runs",
            lease_s=self.lease_s,
            progress_timeout_s=self.limit_s / 4,
            join_timeout_s=self.limit_s / 2,
        )

    def _be_learner(self) -> None:
        penstock.learner.start.Policy = lambda *_: HashPolicy()  # type: ignore[misc, assignment, attr-defined]
        penstock.learner.start.join_process_group = lambda: None  # type: ignore[attr-defined]
        settings = LearnerSettings(
            model=str(self._model),
            dataset=str(self.folder / "questions.jsonl"),
            eval_dataset=str(self.folder / "questions.jsonl"),
            eval_samples=2,
            seed=0,
            max_steps=STEPS,
            save_steps=2,
            max_staleness=2,
            groups_per_step=2,
            num_generations=2,
            max_prompt_length=20,
            max_completion_length=8,
            max_resample_times=20,
        ).model_copy(update=self.options)
        command = LearnerCommand(
            _cli_parse_args=[], redis_url=self.server.url, run=self._run_settings, learner=settings
        )
        penstock.learner.start.run_learner(command, stop_on_signals())

    def _be_actor(self) -> None:
        engine = FakeEngine(
            8,
            self.token_delay_s,
            POISON,
            self.misbehaviour,  # type: ignore[arg-type]
            ends_every_s=_ENDS_EVERY_S,
        )
        command = ActorCommand(
            _cli_parse_args=[], redis_url=self.server.url, run=self._run_settings, actor=ActorSettings()
        )
        penstock.actors.loop.run(command, stop_on_signals(), lambda *_: engine)

    def _be_rewarder(self) -> None:
        penstock.rewarders.loop.ScoringPool = InlinePool  # type: ignore[misc,assignment]
        command = RewarderCommand(
            _cli_parse_args=[],
            redis_url=self.server.url,
            run=self._run_settings,
            rewarder=RewarderSettings(workers=1),
        )
        penstock.rewarders.loop.run(command, stop_on_signals())

    # What it left behind

    def _faults(self) -> set[tuple[str, str]]:
        faults = set(self.watch.found)
        for ticket, state, reason in _ends(self.run_folder):
            if state == "dead" and not _is_hopeless(ticket):
                faults.add(("lost", f"{ticket} is dead: {reason}"))
            if reason.startswith("refused"):
                faults.add(("lost", f"{ticket}: {reason}"))
        if self.stuck:
            return faults | {("stuck", self.stuck)}
        self.watch.look()
        for ticket in self.watch.live:
            faults.add(("lost", f"{ticket} was left behind on a stream"))
        for text in judge(self.run_folder)["faults"]:
            faults.add((_kind_of(text), text))
        best, expected = read_best(RunFolder(self.run_folder)), _best_by_the_rows(self.run_folder)
        if (best and best["step"]) != expected:
            faults.add(("lost", f"the best model is of {best}, by the evaluations of step {expected}"))
        if asides := [str(path) for path in self.run_folder.glob("best/.*")]:
            faults.add(("lost", f"left behind: {asides}"))
        if weights_by_the_journal(self.run_folder) != final_weights(self.run_folder):
            faults.add(("other weights", "the last checkpoint's are not those of the journal's batches"))
        return faults


def _best_by_the_rows(run_folder: Path) -> int | None:
    """The first of the steps with the largest mean reward on held-out questions."""
    rows = [json.loads(line) for line in (run_folder / "evaluations.jsonl").read_text().splitlines()]
    means = {}
    for step in sorted({row["step"] for row in rows}):
        found = [reward["accuracy"] for row in rows if row["step"] == step for reward in row["rewards"]]
        values = [value for value in found if value is not None]
        if values:
            means[step] = sum(values) / len(values)
    return max(means, key=lambda step: (means[step], -step), default=None)


def prepare_model(folder: Path) -> Path:
    """A model folder, made once, in a process of its own: torch's threads would not survive a fork."""
    model = folder / "model"
    if not model.is_dir():
        pid = os.fork()
        if pid == 0:
            make_model(model)
            os._exit(0)
        os.waitpid(pid, 0)
    return model


def in_new_folder(parent: Path, name: str) -> Path:
    """An empty folder for a world."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _write_questions(path: Path) -> None:
    """Sums; one that the engine refuses, one whose reward fails, one whose reward takes long."""
    rows = [{"question": f"{n % 7 + 1}+{n % 3 + 1}=", "answer": "0"} for n in range(QUESTIONS)]
    rows[HOPELESS[0]]["question"] = "8+1="
    rows[HOPELESS[1]]["answer"], rows[2]["answer"] = BROKEN, SLOW
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _become(main: Callable[[], None], log: Path, armed: Armed | None) -> None:
    """The forked process' whole life."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        arm(armed)
        main()
        code = 0
    except PenstockError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = error.exit_code
    except BaseException:  # whatever it is, a forked process must not return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _has_fired(armed: Armed) -> bool:
    return armed.fired is not None and armed.fired.exists()


def _kind_of(fault: str) -> str:
    if any(part in fault for part in ("was trained", "times:", "differs between")):
        return "twice"
    return "other weights" if fault.startswith("steps") else "lost"


def _is_hopeless(ticket: str) -> bool:
    purpose, _, number = ticket.partition(":")
    if purpose == "eval":
        return False
    epoch, index = divmod(int(number), QUESTIONS)
    return int(np.random.default_rng([0, epoch]).permutation(QUESTIONS)[index]) in HOPELESS


def _ends(run_folder: Path) -> list[tuple[str, str, str]]:
    return [
        (ticket, state, reason)
        for _, record in read_records(run_folder)
        for ticket, (state, reason) in record["ends"].items()
    ]
