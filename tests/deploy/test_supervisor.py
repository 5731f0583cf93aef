from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer, started_server
from penstock.common.broker.run_view import RunView
from penstock.common.broker.scale import Scale
from penstock.common.config.command import execute_command
from penstock.common.config.redis_url import parse_url
from penstock.common.errors import ConfigError, MalformedMessage, ServerUnavailable
from penstock.common.files.run_folder import RunFolder
from penstock.common.wire.codec import encode
from penstock.deploy import supervisor
from penstock.deploy.child import Child, Report, Service
from penstock.deploy.devices import DevicePlan, Gpus
from penstock.deploy.scaling.link import ScaleLink
from penstock.deploy.supervisor import SERVER_STAGE, Limits, Supervisor
from penstock.deploy.up import Up, _forget, queue_service, role_services
from tests.helpers import is_dead, wait_until, wait_until_written
from tests.learner.builders import CONTRACT

LIMITS = Limits(
    first_backoff_s=0.05, longest_backoff_s=0.2, settled_s=60, leave_s=5, terminate_s=5, failures=5
)
FOREVER = "while :; do sleep 0.05; done"
STAYS = f"sh -c 'trap \"echo left; exit 0\" TERM; echo here; {FOREVER}'"
STUBBORN = f"sh -c 'trap \"\" TERM; echo here; {FOREVER}'"


def when(flag: Path, then: str) -> str:
    """A command that does `then` once the test has made the file."""
    return f"sh -c 'until [ -e {flag} ]; do sleep 0.02; done; {then}'"


class Shift:
    """A supervisor at work in a thread of its own, and what it reported."""

    def __init__(
        self,
        services: list[Service],
        counts: Mapping[str, int] | None = None,
        limits: Limits = LIMITS,
        devices: DevicePlan | None = None,
    ) -> None:
        self.reports: list[Report] = []
        self.supervisor = Supervisor(
            services, dict(os.environ), self.reports.append, counts, limits, devices
        )
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def said(self, child: str, words: str) -> list[Report]:
        return [one for one in self.reports if one.child == child and words in one.text]

    def wait_for(self, child: str, words: str, times: int = 1) -> Report:
        return wait_until(
            lambda: len(self.said(child, words)) >= times and self.said(child, words)[-1],
            f"{child} to say {words!r} {times} times, not {self.reports}",
        )

    def pid(self, child: str) -> int:
        (found,) = (one.pid for one in self.supervisor.children if one.name == child)
        assert found is not None
        return found

    def position(self, child: str, words: str) -> int:
        return self.reports.index(self.said(child, words)[0])

    def end(self) -> int | None:
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), self.reports
        return self.code

    def stop(self, at_once: bool = False) -> int | None:
        self.supervisor.stop(at_once)
        return self.end()


@pytest.fixture
def shifts() -> Iterator[list[Shift]]:
    """Put every shift here: it is ended with the test."""
    begun: list[Shift] = []
    yield begun
    for shift in begun:
        shift.supervisor.stop()
        shift.stop(at_once=True)


def begin(shifts: list[Shift], commands: dict[str, str], **more: object) -> Shift:
    shift = Shift(role_services(commands), **more)  # type: ignore[arg-type]
    shifts.append(shift)
    return shift


def test_what_dies_is_started_again_with_growing_back_off(shifts: list[Shift]) -> None:
    shift = begin(shifts, {"learner": STAYS, "actor": "sh -c 'exit 70'"})
    for wait_s in ("0.05", "0.1", "0.2"):
        shift.wait_for("actor.1", f"It starts again in {wait_s} s")
    assert "Ended with exit code 70" in shift.said("actor.1", "starts again")[0].text
    shift.wait_for("actor.1", "It starts again in 0.2 s", times=2)
    assert shift.stop() == 0


def test_a_worker_that_leaves_before_its_learner_may_have_seen_the_runs_end(shifts: list[Shift]) -> None:
    shift = begin(shifts, {"learner": STAYS, "actor": "sh -c 'exit 0'"})
    shift.wait_for("actor.1", "It starts again in 0.05 s, unless the run has ended.")


def test_a_process_for_which_there_is_no_room_is_tried_again(
    shifts: list[Shift], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_NO_ROOM_S", 0.1)
    begin_process, tried = Child.start, Counter[str]()

    def start(child: Child, environment: Mapping[str, str]) -> None:
        tried[child.name] += 1
        if child.name == "actor.1" and tried[child.name] < 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        begin_process(child, environment)

    monkeypatch.setattr(Child, "start", start)
    shift = begin(shifts, {"learner": STAYS, "actor": STAYS})
    shift.wait_for("actor.1", "here")
    assert len(shift.said("actor.1", "Not started: Resource temporarily unavailable.")) == 2
    assert len(shift.said("learner.1", "Started as process")) == 1
    shift.stop()


def test_a_child_that_lived_long_enough_starts_with_the_first_back_off_again(
    shifts: list[Shift],
) -> None:
    limits = Limits(first_backoff_s=0.05, settled_s=0.0, leave_s=5, terminate_s=5)
    shift = begin(shifts, {"learner": STAYS, "actor": "sh -c 'exit 1'"}, limits=limits)
    shift.wait_for("actor.1", "It starts again in 0.05 s", times=4)


def test_a_killed_child_is_named_with_its_signal_and_comes_back(shifts: list[Shift]) -> None:
    shift = begin(shifts, {"learner": STAYS, "actor": STAYS}, counts={"actor": 2})
    shift.wait_for("actor.2", "here")
    os.kill(shift.pid("actor.2"), signal.SIGKILL)
    shift.wait_for("actor.2", "Killed by SIGKILL")
    shift.wait_for("actor.2", "here", times=2)
    assert len(shift.said("actor.1", "here")) <= 1


def test_each_child_sees_its_own_gpus_also_when_it_is_started_again(
    shifts: list[Shift], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "all")  # on AMD's GPUs it wins
    show = "sh -c 'echo sees $CUDA_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES.; exit 1'"
    commands = {"learner": show, "actor": show, "rewarder": show}
    plan = DevicePlan(commands, {"actor": 2}, Gpus(tuple("0123")))
    shift = begin(shifts, commands, counts={"actor": 2}, devices=plan)
    for child, gpus in (("learner.1", "0,1"), ("actor.1", "2"), ("actor.2", "3")):
        shift.wait_for(child, f"sees {gpus} {gpus}.", times=2)
    assert shift.wait_for("rewarder.1", "sees").text == "sees all."


def test_what_a_dead_child_left_behind_is_killed(shifts: list[Shift]) -> None:
    parent = "sh -c 'sleep 1000 & echo orphan $!; wait'"
    shift = begin(shifts, {"learner": STAYS, "actor": parent})
    orphan = int(shift.wait_for("actor.1", "orphan").text.split()[1])
    os.kill(shift.pid("actor.1"), signal.SIGKILL)
    wait_until(lambda: is_dead(orphan), "the orphan to be killed")


@pytest.mark.parametrize("code", [78, 65, 73, 81, 127])
def test_an_exit_code_that_a_restart_cannot_mend_ends_the_run_with_it(
    shifts: list[Shift], tmp_path: Path, code: int
) -> None:
    flag = tmp_path / "flag"
    shift = begin(shifts, {"learner": STAYS, "rewarder": STAYS, "actor": when(flag, f"exit {code}")})
    shift.wait_for("learner.1", "here")
    shift.wait_for("rewarder.1", "here")
    flag.touch()
    assert shift.end() == code
    assert len(shift.said("actor.1", "Started")) == 1
    assert shift.said("learner.1", "left")
    shift.wait_for("rewarder.1", "Ended with exit code 0")


def test_a_learner_that_fails_again_and_again_ends_the_run_with_its_code(shifts: list[Shift]) -> None:
    shift = begin(shifts, {"learner": "sh -c 'exit 70'", "actor": STAYS})
    assert shift.end() == 70
    assert len(shift.said("learner.1", "Started")) == LIMITS.failures + 1
    assert shift.said("learner.1", "It failed 6 times in a row. The run stops.")


def test_when_the_learner_has_finished_the_others_leave_by_themselves(
    shifts: list[Shift], tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    worker = f"sh -c 'until [ -e {ended} ]; do sleep 0.02; done; sleep 0.2; echo saw it'"
    shift = begin(shifts, {"learner": f"touch {ended}", "actor": worker, "rewarder": worker})
    assert shift.end() == 0
    for name in ("actor.1", "rewarder.1"):
        shift.wait_for(name, "saw it")
        assert shift.said(name, "Ended with exit code 0")


@pytest.mark.e2e
def test_workers_that_do_not_leave_are_told_to_and_then_killed(
    shifts: list[Shift], tmp_path: Path
) -> None:
    limits = Limits(first_backoff_s=0.05, leave_s=0.2, terminate_s=3)
    flag = tmp_path / "flag"
    commands = {"actor": STAYS, "rewarder": STUBBORN, "learner": when(flag, "exit 0")}
    shift = begin(shifts, commands, limits=limits)
    shift.wait_for("actor.1", "here")
    shift.wait_for("rewarder.1", "here")
    flag.touch()
    assert shift.end() == 0
    assert shift.said("actor.1", "left")
    assert shift.said("rewarder.1", "Killed by SIGKILL")


def test_a_stop_ends_all_roles_at_once_and_the_server_last(shifts: list[Shift], tmp_path: Path) -> None:
    """The platform counts from its signal, and an actor needs its grace period too."""
    told = tmp_path / "told"
    waits = f"until [ -e {told} ]; do sleep 0.02; done; echo closed; exit 0"
    closing = f"sh -c 'trap \"{waits}\" TERM; echo here; {FOREVER}'"
    tells = f"sh -c 'trap \"touch {told}; echo left; exit 0\" TERM; echo here; {FOREVER}'"
    services = [
        Service("queue", ("/bin/sh", "-c", f"exec {STAYS}"), SERVER_STAGE, essential=True),
        *role_services({"actor": tells, "learner": closing, "rewarder": STAYS}),
    ]
    shift = Shift(services, limits=replace(LIMITS, save_s=60))
    shifts.append(shift)
    for child in shift.supervisor.children:
        shift.wait_for(child.name, "here")
    assert shift.stop() == 0
    ended = [("learner.1", "closed"), ("actor.1", "left"), ("rewarder.1", "left")]
    served = shift.position("queue.1", "left")
    assert all(shift.position(*one) < served for one in ended)


def test_the_learner_has_longer_to_save_than_the_others_to_end(shifts: list[Shift]) -> None:
    saves = f"sh -c 'trap \"sleep 1; echo saved; exit 0\" TERM; echo here; {FOREVER}'"
    limits = Limits(terminate_s=0.2)
    shift = begin(shifts, {"learner": saves, "actor": STUBBORN}, limits=limits)
    shift.wait_for("learner.1", "here")
    shift.wait_for("actor.1", "here")
    assert shift.stop() == 0
    assert shift.said("learner.1", "saved")
    assert shift.said("actor.1", "Killed by SIGKILL")


def test_a_second_stop_does_not_wait(shifts: list[Shift]) -> None:
    limits = Limits(terminate_s=1000)
    shift = begin(shifts, {"learner": STUBBORN, "actor": STUBBORN}, limits=limits)
    shift.wait_for("learner.1", "here")
    shift.wait_for("actor.1", "here")
    for _ in range(3):
        shift.supervisor.stop()  # as a machine that ends, which sends several signals
    assert not shift.said("actor.1", "Killed")
    assert shift.stop(at_once=True) == 128 + signal.SIGKILL


def test_the_queue_server_survives_its_kill(shifts: list[Shift], tmp_path: Path) -> None:
    shift = Shift([queue_service(RunFolder(tmp_path)), *role_services({"learner": STAYS})])
    shifts.append(shift)
    shift.wait_for("learner.1", "here")
    connection = Connection(started_server(RunFolder(tmp_path)), 10, 20)
    connection.execute("SET", "key", "value")
    wait_until_written(connection)
    os.kill(shift.pid("queue.1"), signal.SIGKILL)
    assert connection.execute("GET", "key") == b"value"
    shift.wait_for("queue.1", "Killed by SIGKILL")
    assert connection.restarts == 1
    assert len(shift.said("learner.1", "Started")) == 1
    assert shift.stop() == 0


def test_roles_start_only_when_the_server_answers(shifts: list[Shift], tmp_path: Path) -> None:
    door = tmp_path / "open"
    server = Service("queue", ("sleep", "1000"), SERVER_STAGE, True, door.exists)
    shift = Shift([server, *role_services({"learner": STAYS})])
    shifts.append(shift)
    shift.wait_for("queue.1", "Started")
    assert not shift.said("learner.1", "Started")
    door.touch()
    shift.wait_for("learner.1", "Started")


def test_a_server_that_never_answers_ends_the_run(shifts: list[Shift]) -> None:
    limits = Limits(ready_s=0.1, terminate_s=5)
    server = Service("queue", ("sleep", "1000"), SERVER_STAGE, True, lambda: False)
    shift = Shift([server, *role_services({"learner": STAYS})], limits=limits)
    shifts.append(shift)
    assert shift.end() == 69
    (said,) = shift.said("queue.1", "Not ready after ")
    assert said.text.endswith(" s, and the other services wait for it. The run stops.")
    assert not shift.said("learner.1", "Started")


def test_a_stopped_child_is_continued_to_hear_that_it_is_to_end(shifts: list[Shift]) -> None:
    shift = begin(shifts, {"learner": STAYS}, limits=Limits(terminate_s=1000))
    shift.wait_for("learner.1", "here")
    os.kill(shift.pid("learner.1"), signal.SIGSTOP)
    shift.stop()
    assert shift.said("learner.1", "left")


def test_without_a_learner_the_run_ends_when_all_have_left(shifts: list[Shift]) -> None:
    shift = begin(shifts, {"actor": "true", "rewarder": "true"}, counts={"actor": 3})
    assert shift.end() == 0
    assert len(shift.said("actor.3", "Started")) == 1


def test_more_and_fewer_workers_run_as_asked_and_nobody_else_starts_again(shifts: list[Shift]) -> None:
    commands = {"learner": STAYS, "actor": STAYS, "rewarder": STAYS}
    shift = begin(shifts, commands)
    shift.wait_for("actor.1", "here")
    shift.supervisor.ask("actor", 3)
    shift.wait_for("actor.2", "here")
    shift.wait_for("actor.3", "here")
    assert shift.supervisor.counts() == {"actor": 3, "rewarder": 1}
    shift.supervisor.ask("actor", 1)
    for child in ("actor.3", "actor.2"):
        shift.wait_for(child, "Ended with exit code 0.")
    told = [one.child for one in shift.reports if "Told to end" in one.text]
    assert told == ["actor.3", "actor.2"]
    shift.supervisor.ask("actor", 2)
    shift.supervisor.ask("learner", 2)  # no role of workers
    shift.wait_for("actor.2", "here", times=2)
    assert shift.stop() == 0
    assert [len(shift.said(child, "Started")) for child in ("learner.1", "actor.1", "rewarder.1")] == [
        1
    ] * 3
    assert not shift.said("learner.2", "")


def test_of_more_workers_than_are_asked_for_those_that_do_not_run_end_first(
    shifts: list[Shift], tmp_path: Path
) -> None:
    fails = f"sh -c 'mkdir {tmp_path}/first && exit 70; echo here; {FOREVER}'"
    limits = replace(LIMITS, first_backoff_s=60.0, longest_backoff_s=60.0)
    shift = begin(shifts, {"learner": STAYS, "actor": fails}, limits=limits)
    shift.wait_for("actor.1", "It starts again in 60 s")
    shift.supervisor.ask("actor", 3)
    shift.wait_for("actor.2", "here")
    shift.wait_for("actor.3", "here")
    shift.supervisor.ask("actor", 1)
    shift.wait_for("actor.3", "Killed by SIGTERM")
    told = [one.child for one in shift.reports if "Told to end" in one.text]
    assert told == ["actor.1", "actor.3"]


def test_a_worker_that_does_not_end_when_there_are_to_be_fewer_is_killed(shifts: list[Shift]) -> None:
    commands = {"learner": STAYS, "actor": STUBBORN}
    shift = begin(shifts, commands, limits=replace(LIMITS, terminate_s=0.5))
    shift.supervisor.ask("actor", 2)
    shift.wait_for("actor.2", "here")
    shift.supervisor.ask("actor", 1)
    shift.wait_for("actor.2", "Killed by SIGKILL")
    shift.wait_for("actor.2", "Killed, as it did not end in 0.5 s.")
    assert len(shift.said("actor.1", "Started")) == len(shift.said("learner.1", "Started")) == 1


COUNTS = """
n=0; trap 'n=$((n+1))' TERM; echo here
until [ $n -gt 0 ]; do sleep 0.05; done
sleep 0.5; echo heard $n
"""


def test_a_worker_that_is_ending_hears_nothing_more_of_a_stop(
    shifts: list[Shift], tmp_path: Path
) -> None:
    (script := tmp_path / "counts.sh").write_text(COUNTS)
    shift = begin(shifts, {"learner": STAYS, "actor": f"sh {script}"})
    shift.wait_for("actor.1", "here")
    shift.supervisor.ask("actor", 0)
    shift.wait_for("actor.1", "Told to end")
    assert shift.stop() == 0
    assert shift.said("actor.1", "heard 1")


def test_a_worker_more_gets_a_free_gpu_or_waits_for_one(shifts: list[Shift]) -> None:
    commands = {"learner": STAYS, "actor": f"sh -c 'echo sees $CUDA_VISIBLE_DEVICES; {FOREVER}'"}
    plan = DevicePlan(commands, {}, Gpus(tuple("0123")), "learner=0,actor=1-2")
    shift = begin(shifts, commands, devices=plan)
    shift.wait_for("actor.1", "sees 1")
    shift.supervisor.ask("actor", 3)
    shift.wait_for("actor.2", "sees 2")
    shift.wait_for("actor.3", "Not started: no GPU is free for it, and 3 are asked for. Ask for fewer.")
    shift.supervisor.ask("actor", 1)
    shift.wait_for("actor.2", "Killed by SIGTERM")
    shift.supervisor.ask("actor", 2)
    shift.wait_for("actor.2", "sees 2", times=2)
    assert len(shift.said("actor.3", "Not started")) == 1


def test_a_run_whose_learner_is_elsewhere_ends_when_it_is_told_so(shifts: list[Shift]) -> None:
    commands = {"actor": "sh -c 'echo here; exit 0'", "rewarder": STAYS}
    shift = begin(shifts, commands, limits=Limits(first_backoff_s=0.05, leave_s=0.2))
    shift.supervisor.goes_on = True
    shift.wait_for("actor.1", "here", times=2)
    shift.wait_for("rewarder.1", "here")
    shift.supervisor.leave()
    assert shift.end() == 0
    assert shift.said("rewarder.1", "left")


# The command itself


def up(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.deploy", "up", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_up_runs_a_procfile_with_a_server_and_the_files_variables(tmp_path: Path) -> None:
    (tmp_path / "Procfile").write_text(
        "learner: sh -c 'echo steps $LEARNER_MAX_STEPS seed $LEARNER_SEED; test -s $URL'\n"
        "actor: sh -c 'echo hello; exec sleep 0.1'\n"
    )
    (tmp_path / "recipe.env").write_text("LEARNER_MAX_STEPS=3\nLEARNER_SEED=1\nRUN_NAME=mine\n")
    process = up(
        tmp_path, "--env-file", "recipe.env", "--actors", "2",
        LEARNER_SEED="9", URL="runs/mine/queue/url",
    )  # fmt: skip
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "learner.1" in out
    assert "| steps 3 seed 9" in out
    assert "queue.1" in out
    assert "actor.2" in out


def test_up_starts_no_server_where_redis_url_is_set(tmp_path: Path, queue_server: LocalServer) -> None:
    (tmp_path / "Procfile").write_text("learner: sh -c 'echo $REDIS_URL'\n")
    out, _ = up(tmp_path, REDIS_URL=queue_server.url).communicate(timeout=120)
    assert queue_server.url in out
    assert "queue.1" not in out


def test_up_listens_where_asked_with_the_password_of_the_file(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("of the file\n")
    password.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "Procfile").write_text(f"learner: {STAYS}\n")
    process = up(tmp_path, "--listen", f"127.0.0.1:{port}", RUN_QUEUE_PASSWORD_FILE=str(password))
    try:
        url = f"redis://:of%20the%20file@127.0.0.1:{port}/0"
        assert Connection(url, 60, 10).execute("PING")
        folder = Path(parse_url(started_server(RunFolder(tmp_path / "runs/run"))).path).parent
    finally:
        process.terminate()
        out, _ = process.communicate(timeout=120)
    assert "of the file" not in out
    assert not folder.exists()


@pytest.mark.parametrize(
    ("variables", "listen", "error"),
    [
        ({}, "127.0.0.1:7000", "RUN_QUEUE_PASSWORD_FILE is not set"),
        ({"RUN_QUEUE_PASSWORD_FILE": "none"}, "127.0.0.1:7000", "none cannot be read"),
        ({"RUN_QUEUE_PASSWORD_FILE": "/dev/null"}, "127.0.0.1:7000", "expected one line"),
        ({"RUN_QUEUE_PASSWORD_FILE": "none"}, "127.0.0.1:70000", "expected a port of 1 to 65535"),
        ({"REDIS_URL": "redis://127.0.0.1:1"}, "127.0.0.1:7000", "no queue server is started"),
    ],
)
def test_up_listens_with_a_password_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], listen: str, error: str
) -> None:
    (tmp_path / "Procfile").write_text("learner: true\n")
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "runs"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=error):
        Up(procfile=tmp_path / "Procfile", listen=listen).run(lambda _: None)


def test_up_does_not_start_where_its_port_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Procfile").write_text("learner: true\n")
    (tmp_path / "password").write_text("of the file\n")
    (tmp_path / "password").chmod(0o600)
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("RUN_QUEUE_PASSWORD_FILE", str(tmp_path / "password"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        started = Up(procfile=tmp_path / "Procfile", listen=f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"at 127.0.0.1, port {port}: Address already in use"):
            started.run(lambda _: None)


def test_workers_of_a_run_that_has_ended_may_wait_until_it_goes_on(
    connection: Connection, run_name: str
) -> None:
    keys, watched = Keys(run_name), Supervisor([], {}, lambda _: None)
    connection.execute("SET", keys.state, "ended")
    connection.execute("HSET", keys.fence, "lease", 0)
    link = ScaleLink(watched, lambda _: connection, run_name, lambda _: None, guest=True)
    for state, leaves in (("ended", False), ("running", False), ("ended", True)):
        connection.execute("SET", keys.state, state)
        link._look()
        assert watched._left is leaves


@pytest.mark.parametrize("states", [["ended"], ["running"], ["running", "ended"]])
def test_workers_leave_with_the_server_if_their_run_has_ended_since_they_came(
    connection: Connection, run_name: str, states: list[str]
) -> None:
    keys, watched = Keys(run_name), Supervisor([], {}, lambda _: None)
    connection.execute("HSET", keys.fence, "lease", 0)
    link = ScaleLink(watched, lambda _: connection, run_name, lambda _: None, guest=True)
    for state in states:
        connection.execute("SET", keys.state, state)
        link._look()
    watched._left = False  # only what the loss does is looked at
    link._forget(ServerUnavailable("no answer within 1 s"))
    assert watched._left is (len(states) == 2)


def test_what_was_asked_of_a_penstock_up_is_not_for_the_next_of_its_host_and_process_id(
    connection: Connection, run_name: str
) -> None:
    """As in a container that starts again."""
    asked, scale = list[tuple[str, int]](), Scale(connection, Keys(run_name))
    watched = Supervisor([], {}, lambda _: None)
    watched.ask = lambda *what: asked.append(what)  # type: ignore[method-assign]
    for _ in range(2):
        link = ScaleLink(watched, lambda _: connection, run_name, lambda _: None)
        link._look()
        assert asked == []
        scale.request(link.name, "actor", 0)


def test_up_runs_some_roles_for_a_run_elsewhere_until_that_ends(
    tmp_path: Path, connection: Connection, queue_server: LocalServer, run_name: str
) -> None:
    waits = when(flag := tmp_path / "flag", "exit 0")
    (tmp_path / "Procfile").write_text(f"learner: false\nactor: {waits}\nrewarder: {waits}\n")
    (file := tmp_path / "url").write_text("redis://127.0.0.1:1/0")
    variables = {"REDIS_URL_FILE": str(file), "RUN_NAME": run_name}
    scale, view = Scale(connection, Keys(run_name)), RunView(connection, Keys(run_name))
    process = up(tmp_path, "--only", "actor,rewarder", "--actors", "2", **variables)
    try:
        wait_until((tmp_path / "runs" / run_name / "logs").exists, "a start")
        file.write_text(queue_server.url)  # the learner's job began again on another node
        (status,) = wait_until(lambda: list(scale.running().values()), "the status")
        assert status.processes == {"actor": 2, "rewarder": 1}
        scale.request(scale.choose("", "actor"), "actor", 1)
        wait_until(lambda: next(iter(scale.running().values())).processes["actor"] == 1, "one actor")
        again, _ = up(tmp_path, "--only", "actor", **variables).communicate(timeout=120)
        assert "RunTaken: another `penstock up --only actor` holds the run's folder" in again
        connection.execute("SET", Keys(run_name).state, "ended")
        connection.execute("HSET", Keys(run_name).fence, "lease", 0)
        assert view.ended()
        flag.touch()
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert "learner.1" not in out
    assert "queue.1" not in out
    assert scale.running() == {}
    logs = tmp_path / "runs" / run_name / "logs" / socket.gethostname()
    assert sorted(path.name for path in logs.iterdir()) == [
        "actor.1.log",
        "actor.2.log",
        "rewarder.1.log",
    ]


@pytest.mark.parametrize(
    ("flags", "url", "error"),
    [
        (["--only", "actor"], "", "--only actor: no REDIS_URL is set, expected the address"),
        (
            ["--only", "actor", "--listen", "h:1"],
            "redis://h",
            "--listen is for the machine with the server",
        ),
        (["--only", "actor,judge"], "redis://h", "the Procfile has no judge; it has learner, actor"),
        (
            ["--only", "actor", "--rewarders", "2"],
            "redis://h",
            "--rewarders: the Procfile has no rewarder",
        ),
    ],
)
def test_up_refuses_what_only_some_roles_cannot_have(
    flags: list[str], url: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Procfile").write_text("learner: true\nactor: true\n")
    monkeypatch.setenv("REDIS_URL", url)
    assert execute_command(Up, "penstock up", flags) == 78
    assert error in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.e2e
def test_up_killed_with_9_leaves_nothing_running_and_can_be_started_again(tmp_path: Path) -> None:
    procfile = tmp_path / "Procfile"
    procfile.write_text(f"learner: {STAYS}\n")
    process = up(tmp_path)
    children = wait_until(lambda: three_children(process.pid), "guard, learner and server")
    process.kill()
    process.communicate(timeout=120)
    for pid in children:
        wait_until(lambda pid=pid: is_dead(pid), f"child {pid} to be killed")
    procfile.write_text("learner: true\n")
    again = up(tmp_path)
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, out


def three_children(pid: int) -> list[int]:
    """Guard, learner and server, as soon as they are there."""
    children = [child.pid for child in psutil.Process(pid).children()]
    return children if len(children) == 3 else []


def test_a_caller_may_read_the_reports_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue_server: LocalServer
) -> None:
    procfile = tmp_path / "Procfile"
    procfile.write_text("learner: sh -c 'echo one step'\n")
    monkeypatch.setenv("REDIS_URL", queue_server.url)
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "runs"))
    reports: list[Report] = []
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(Up(procfile=procfile).run(reports.append)))
    thread.start()
    thread.join(timeout=120)
    assert found == [0]
    assert Report("learner.1", "output", "one step") in reports


@pytest.mark.parametrize(
    ("command", "grace_s", "expected"), [("actor", 120, 120), ("actor", 9, 30), ("x", 120, 30)]
)
def test_actors_have_their_grace_period_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, grace_s: int, expected: int
) -> None:
    (tmp_path / "Procfile").write_text(f"learner: true\n{command}: true\n")
    for name, value in {"RUN_DIR": str(tmp_path / "runs"), "ACTOR_GRACE_S": str(grace_s)}.items():
        monkeypatch.setenv(name, value)
    given = []

    def supervise(*arguments: object) -> Supervisor:
        given.extend(one for one in arguments if isinstance(one, Limits))
        raise SystemExit

    monkeypatch.setattr("penstock.deploy.up.Supervisor", supervise)
    with pytest.raises(SystemExit):
        Up(procfile=tmp_path / "Procfile").run(lambda _: None)
    assert [one.terminate_s for one in given] == [expected]


def test_a_misspelt_variable_ends_up_with_78_before_anything_starts(tmp_path: Path) -> None:
    process = up(tmp_path, LEARNER_MAX_STEP="3")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 78
    assert "did you mean LEARNER_MAX_STEPS?" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("own", "limit"), [({}, "600"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}, "9")])
def test_torchrun_waits_for_its_learners_as_long_as_up(
    tmp_path: Path, own: dict[str, str], limit: str
) -> None:
    (tmp_path / "Procfile").write_text("learner: sh -c 'echo waits $TORCH_ELASTIC_SHUTDOWN_TIMEOUT'\n")
    out, _ = up(tmp_path, **own).communicate(timeout=120)
    assert f"| waits {limit}\n" in out


def test_ctrl_c_ends_up_in_order(tmp_path: Path) -> None:
    (tmp_path / "Procfile").write_text(f"learner: {STAYS}\n")
    process = up(tmp_path)
    assert process.stdout is not None
    next(line for line in process.stdout if "| here" in line)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.index("| left") < out.rindex("queue.1")


def test_a_procfiles_own_number_of_threads_wins_and_a_rewarder_gets_none() -> None:
    show = "sh -c 'echo threads=$OMP_NUM_THREADS'"
    commands = {"learner": show, "actor": f"OMP_NUM_THREADS=7 {show}", "rewarder": show}
    said = {
        service.name: subprocess.run(
            service.command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for service in role_services(commands, threads=4)
    }
    assert said == {"learner": "threads=4", "actor": "threads=7", "rewarder": "threads="}


@pytest.mark.parametrize(
    ("contract", "listening", "stays"),
    [
        (encode(CONTRACT), False, False),
        (encode(CONTRACT), True, True),
        (b"of another release", False, True),
    ],
)
def test_what_an_earlier_start_left_is_forgotten_where_nobody_works_by_it(
    connection: Connection, keys: Keys, contract: bytes, listening: bool, stays: bool
) -> None:
    """A learner has to see another release's contract, to refuse it."""
    connection.execute("SET", keys.state, "ended")
    connection.execute("SET", keys.contract, contract)
    with contextlib.suppress(MalformedMessage):
        _forget(connection, keys, listening)
    assert connection.execute("EXISTS", keys.state) == 0
    assert connection.execute("EXISTS", keys.contract) == stays
