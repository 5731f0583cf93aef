"""`penstock autoscale`: its rule, and what it does in a simulated run, whose clock is made."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.process_status import (
    LearnerProgress,
    WorkerStatus,
    server_time_ms,
    write_status,
)
from penstock.common.broker.scale import Scale
from penstock.common.config.command import build, execute_command
from penstock.common.errors import ConfigError, RunNotReady
from penstock.deploy.__main__ import Penstock
from penstock.deploy.scaling import autoscale
from penstock.deploy.scaling.autoscale import Autoscale, Measuring, Rule
from tests.common.builders import Run
from tests.helpers import AclUsers

GROUPS, STALENESS, TOKENS_PER_S, START_S = 8, 2, 100, 15.0


class Simulation:
    """A run in made time: a step of 8 groups takes the learner `update_s`, a group an actor `group_s`.

    The times of groups are lognormal. `asked` actors run, of which a new one needs 15 s to start.
    """

    def __init__(self, update_s: float, group_s: float, asked: int, seed: int = 1) -> None:
        self.update_s, self.group_s, self.asked = update_s, group_s, asked
        self.now = 0.0
        self._random = random.Random(seed)
        self._joins = [0.0] * asked  # by actor, when it joins
        self._ends: list[tuple[float, int, float]] = []  # of groups in work: when, actor, tokens
        self._scored = 0
        self._free_at, self._asked_at = 0.0, 0.0  # when the learner is free, and when it began to wait
        self._steps: deque[tuple[float, float]] = deque(maxlen=5)  # seconds and wait of each
        self._made: deque[tuple[float, int, float]] = deque()  # of the groups that ended
        self.step = 0
        self.waits: list[tuple[float, float]] = []

    def run_to(self, time: float) -> None:
        """Let time pass."""
        while self.now < time:
            self._joins = self._joins[: self.asked]
            self._joins += [self.now + START_S] * (self.asked - len(self._joins))
            self._begin_groups()
            self._train()
            ends = self._ends[0][0] if self._ends else math.inf
            free = self._free_at if self._free_at > self.now else math.inf
            joins = min((one for one in self._joins if one > self.now), default=math.inf)
            self.now = min(time, ends, free, joins)
            while self._ends and self._ends[0][0] <= self.now:
                self._made.append(heapq.heappop(self._ends))
                self._scored += 1

    def _begin_groups(self) -> None:
        """Give each actor that waits a ticket, as far as the learner's staleness allows."""
        busy = {actor for _, actor, _ in self._ends}
        for actor, joined in enumerate(self._joins):
            is_allowed = len(self._ends) + self._scored < (STALENESS + 1) * GROUPS
            if is_allowed and joined <= self.now and actor not in busy:
                lasts = self.group_s * self._random.lognormvariate(-0.125, 0.5)
                heapq.heappush(self._ends, (self.now + lasts, actor, TOKENS_PER_S * lasts))

    def _train(self) -> None:
        """Begin an Update if the learner is free and has the groups."""
        if self.now >= self._free_at and self._scored >= GROUPS:
            self._scored -= GROUPS
            wait = self.now - self._free_at
            self._free_at = self.now + self.update_s
            self._steps.append((wait + self.update_s, wait))
            self.waits.append(self._steps[-1])
            self.step += 1

    def look(self) -> tuple[list[float], LearnerProgress]:
        """The rates of the actors that have joined, in the last 2 s, and the learner's progress."""
        while self._made and self._made[0][0] < self.now - 2:
            self._made.popleft()
        joined = sum(one <= self.now for one in self._joins)
        rates = [sum(made for _, by, made in self._made if by == n) / 2 for n in range(joined)]
        count = max(1, len(self._steps))
        step_s, wait_s = (
            (sum(values) / count for values in zip(*self._steps, strict=True)) if self._steps else (0, 0)
        )
        progress = LearnerProgress(
            0, self.step, 9999, (), (), (), 1.0, step_s, wait_s, 1.0, GROUPS, GROUPS
        )  # fmt: skip
        return rates, progress


def right_number(update_s: float, group_s: float, target: float, most: int) -> int:
    """The smallest number of actors whose wait, measured over half an hour, is below the target."""
    for actors in range(1, most):
        run = Simulation(update_s, group_s, actors, seed=7)
        run.run_to(1800)
        seconds, waits = (sum(values) for values in zip(*run.waits[20:], strict=True))
        if waits / seconds < target:
            return actors
    return most


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_smallest_number_within_three_minutes_of_a_change_and_stays(seed: int) -> None:
    """The learner is slowed, then fast again; then answers get longer."""
    run, measuring = Simulation(4.0, 1.0, 1, seed), Measuring(Rule(1, 8, 0.1))
    for update_s, group_s in ((4.0, 1.0), (10.0, 1.0), (4.0, 1.0), (4.0, 2.0), (4.0, 1.6)):
        run.update_s, run.group_s = update_s, group_s
        right = right_number(update_s, group_s, 0.1, 8)
        changed_at, asked = run.now, [run.asked]
        for second in range(1, 901):
            run.run_to(changed_at + second)
            rates, progress = run.look()
            wanted = measuring.look(run.asked, rates, progress)
            if wanted is not None:
                run.asked = wanted
                asked.append(wanted)
            if second >= 180:
                assert abs(run.asked - right) <= 1, (update_s, group_s, second, asked, right)
        assert right <= run.asked <= right + 1, (update_s, group_s, asked, right)
        steps = Counter(itertools.pairwise(asked))
        assert max(steps.values(), default=0) <= 2, asked  # chance may bring it back once, no more


def test_it_jumps_to_what_the_wait_suggests_and_halves_the_way_down() -> None:
    rule = Rule(1, 8, 0.1)
    assert rule.next(1, 0.7, load=100) == 3
    assert rule.next(3, 0.12, load=100) == 4
    assert rule.next(4, 0.02, load=100) == 4  # 3 was too small
    assert rule.next(4, 0.02, load=79) == 3  # with a fifth less load 3 may be enough, and not 1
    assert rule.next(4, 0.02, load=33) == 2  # nor need 1 be too few with a third
    assert rule.next(2, 0.5, load=33) == 4
    assert rule.next(4, 0.02, load=33) == 3
    assert rule.next(8, 0.9, load=500) == 8
    assert rule.next(2, 0.99, load=900) == 8


def test_the_bounds_hold_also_for_a_number_that_was_set_by_hand() -> None:
    assert Rule(2, 4, 0.1).next(9, 0.0, load=1) == 4
    assert Rule(2, 4, 0.1).next(1, 0.0, load=1) == 2
    assert Rule(2, 4, 0.1).next(0, 0.0, load=1) == 2
    assert Rule(2, 4, 0.1).next(2, 0.0, load=1) == 2
    with pytest.raises(ConfigError, match="--min 3 is above --max 2"):
        build(Autoscale, {"min": 3, "max": 2})


def test_actors_of_other_machines_are_counted_beside_those_that_are_asked_for() -> None:
    rule = Rule(1, 8, 0.1)
    assert rule.next(1, 0.5, load=100, others=8) == 8  # 17 are wanted
    assert rule.next(1, 0.25, load=100, others=8) == 3  # 11
    assert rule.next(3, 0.02, load=100, others=8) == 2  # 1 would be 9 in all, which were too few
    assert rule.next(2, 0.02, load=100, others=8) == 2
    assert rule.next(2, 0.02, load=100, others=16) == 1


def progress(step: int, wait_s: float) -> LearnerProgress:
    return LearnerProgress(0, step, 99, (), (), (), 1.0, 1.0, wait_s, 1.0, 8, 8)


def test_steps_and_waits_from_before_a_change_do_not_count() -> None:
    measuring = Measuring(Rule(1, 8, 0.1))
    assert [measuring.look(1, [5.0], progress(step, 0.7)) for step in range(16)] == [None] * 16
    assert measuring.look(1, [5.0], progress(16, 0.7)) == 3
    assert {measuring.look(3, [5.0], progress(step, 0.7)) for step in range(17, 50)} == {
        None
    }  # they start
    assert [measuring.look(3, [5.0] * 3, progress(step, 0.11)) for step in range(50, 76)] == [None] * 26
    assert measuring.look(3, [5.0] * 3, progress(76, 0.11)) == 4  # a little too much, twice in a row


@pytest.mark.parametrize(("idle", "asked"), [(0.0, 6), (0.2, 6), (0.3, 2), (0.6, 2)])
def test_no_more_actors_are_asked_for_while_they_wait_themselves(idle: float, asked: int) -> None:
    """Rewarders are the limit, or the longest answers: more actors would wait too, and so may fewer."""
    measuring = Measuring(Rule(1, 8, 0.1))
    looks = [measuring.look(4, [5.0] * 4, progress(step, 0.3), idle=idle) for step in range(18)]
    assert [wanted for wanted in looks if wanted] == [asked]


@pytest.mark.parametrize(("actors", "asked"), [(0, 1), (9, 8)])
def test_a_number_outside_of_the_bounds_is_not_measured_first(actors: int, asked: int) -> None:
    """Without actors no step would ever come."""
    assert Measuring(Rule(1, 8, 0.1)).look(actors, [5.0] * actors, progress(0, 0.0)) == asked


def test_an_actor_that_never_joins_is_waited_for_for_ten_minutes() -> None:
    measuring = Measuring(Rule(1, 8, 0.1))
    assert [measuring.look(2, [5.0], progress(step, 0.7)) for step in range(600)] == [None] * 600
    later = [measuring.look(2, [5.0], progress(step, 0.7)) for step in range(600, 620)]
    assert [wanted for wanted in later if wanted] == [4]  # two more, by the one that works


@pytest.mark.parametrize(
    ("most", "wait_s", "asked"), [(8, 0.25, None), (16, 0.25, 9), (16, 0.9, 16), (8, 0.02, 6)]
)
def test_actors_that_never_join_cost_none_that_work(most: int, wait_s: float, asked: int | None) -> None:
    """Of 8 that are asked for 4 work, which wait for nobody: 5 would end three of them."""
    measuring = Measuring(Rule(1, most, 0.1))
    looks = [measuring.look(8, [5.0] * 4, progress(step, wait_s)) for step in range(620)]
    assert next((wanted for wanted in looks if wanted), None) == asked


def test_actors_of_other_machines_are_not_taken_for_those_that_start() -> None:
    measuring = Measuring(Rule(1, 8, 0.1))
    looks = [measuring.look(1, [5.0] * 9, progress(step, 0.3), others=8) for step in range(18)]
    assert [wanted for wanted in looks if wanted] == [4]
    starting = [measuring.look(4, [5.0] * 9, progress(step, 0.3), others=8) for step in range(18, 90)]
    assert set(starting) == {None}


def test_the_command_asks_the_penstock_up_of_the_run_until_its_end(
    connection: Connection, keys: Keys, run_name: str, queue_server: LocalServer,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also if that `penstock up` is away for a while, and if another client says that the run ended."""
    monkeypatch.setattr(autoscale, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(autoscale, "stop_on_signals", threading.Event)
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    monkeypatch.setenv("RUN_NAME", run_name)
    Run(connection, keys).learner.beat(600.0, "busy")
    connection.execute("SET", keys.state, "ended")
    scale, name = Scale(connection, keys), "one-1\x1b[2J"
    scale.write_status(name, "one", {"actor": 1})
    looked, look = threading.Event(), Measuring.look
    signals = iter([looked.set])  # after the first look alone

    def look_and_tell(*arguments: Any) -> int | None:
        next(signals, lambda: None)()
        return look(*arguments)

    monkeypatch.setattr(Measuring, "look", look_and_tell)

    def play() -> None:
        """The learner's steps, of which it waits 70%, until the request, then the end."""
        for step in range(100_000):
            now = server_time_ms(connection)
            write_status(
                connection, keys.processes, "a", WorkerStatus("actor", "one", now, "", "", 1.0, 9.0)
            )
            write_status(connection, keys.processes, "learner", progress(step, 0.7))
            if looked.is_set():
                scale.leave(name)
                time.sleep(0.2)
                looked.clear()
            scale.write_status(name, "one", {"actor": 1})
            if scale.requests(name):
                break
        connection.execute("HSET", keys.fence, "lease", 0)

    playing = threading.Thread(target=play)
    playing.start()
    assert execute_command(Penstock, "penstock", ["autoscale", "--max", "8"]) == 0
    playing.join()
    assert scale.requests(name) == {"actor": 3}
    said = "one-1\\x1b[2J: 1 -> 3 actors, as the learner waits 70%.\n"
    assert capsys.readouterr().out == said, "without a terminal's commands"


def test_it_ends_without_the_right_to_ask(
    acl_users: AclUsers, keys: Keys, tmp_path: Path, run_name: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(autoscale, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(autoscale, "stop_on_signals", threading.Event)
    monkeypatch.setattr(Measuring, "look", lambda *_: 3)
    monkeypatch.setenv("REDIS_URL_FILE", str(tmp_path / "users" / "reader.url"))
    monkeypatch.setenv("RUN_NAME", run_name)
    Run(acl_users.learner, keys)
    Scale(acl_users.learner, keys).write_status("one-1", "one", {"actor": 1})
    write_status(acl_users.learner, keys.processes, "learner", progress(1, 0.7))
    assert execute_command(Penstock, "penstock", ["autoscale", "--max", "8"]) == 78
    assert "->" not in capsys.readouterr().out


def test_it_says_that_it_waits_for_a_run_and_ends_if_none_comes(
    queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autoscale, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(autoscale, "stop_on_signals", threading.Event)
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    monkeypatch.setenv("RUN_NAME", "misspelt")
    monkeypatch.setenv("RUN_JOIN_TIMEOUT_S", "0.5")
    assert execute_command(Penstock, "penstock", ["autoscale", "--max", "8"]) == RunNotReady.exit_code
    out, err = capsys.readouterr()
    assert out.count("Waiting for run misspelt: ") == 1
    assert "misspelt" in err
