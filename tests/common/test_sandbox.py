"""A sandbox process calls any function by its name, and survives what the function does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.common.sandbox.handle import Mistake
from penstock.common.sandbox.pool import SandboxPool
from penstock.common.sandbox.settings import SandboxFailed, SandboxSettings

WORK = "tests.common.sandbox_work"


def settings(**changes: object) -> SandboxSettings:
    values = {"timeout_s": 60.0, "memory_gib": 1.0, "user": "", "environment": (), "modules": (WORK,)}
    names = {"workers": 1, "built_in": f"{WORK}:pid", "load": f"{WORK}:echo", "section": "SOLVER"}
    return SandboxSettings(**(names | values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(settings()) as pool:
        yield pool


def test_a_function_runs_in_another_process(pool: SandboxPool) -> None:
    assert pool.run(f"{WORK}:echo", [1, "a", None, {"b": 2.5}]) == [1, "a", None, {"b": 2.5}]
    assert pool.run(f"{WORK}:pid") == pool.run(f"{WORK}:pid")


def test_an_exception_comes_back_as_text(pool: SandboxPool) -> None:
    assert pool.run(f"{WORK}:fail") == Mistake("ValueError: math domain error")


def test_arguments_may_hold_bytes_and_all_other_plain_data(pool: SandboxPool) -> None:
    value = {"image": [b"\x89PNG\xff", b""], "text": "\ud800", 1: [float("inf"), -(2**63), 2**64 - 1]}
    assert pool.run(f"{WORK}:described", value) == repr(value)


def test_what_cannot_be_sent_is_a_mistake_on_either_side(pool: SandboxPool) -> None:
    assert "not JSON serializable" in pool.run(f"{WORK}:no_json").reason
    assert "the arguments are no plain data" in pool.run(f"{WORK}:echo", object()).reason
    assert pool.run(f"{WORK}:echo", 6) == 6


def test_the_settings_of_the_section_are_named(pool: SandboxPool) -> None:
    outcome = pool.run(f"{WORK}:allocate")
    assert outcome == Mistake("needs more memory than SOLVER_MEMORY_GIB=1 allows")
    assert pool.run(f"{WORK}:leave", 3) == Mistake("killed its process (exit code 3)")


def test_a_call_is_killed_at_its_time_limit() -> None:
    with SandboxPool(settings(timeout_s=5.0)) as pool:
        assert pool.run(f"{WORK}:hang") == Mistake("took more than 5 s")
        assert pool.finished == 1
        assert pool.run(f"{WORK}:echo", 6) == 6


def test_a_process_that_ends_at_every_start_is_an_error() -> None:
    with pytest.raises(SandboxFailed, match="killed 5 times before it was ready"):
        SandboxPool(settings(built_in=f"{WORK}:leave"))


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    script = (
        "import resource\n"
        "from penstock.common.sandbox.limits import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "for needed in (90, 150, 201):\n"
        "    try: allow_open_files(needed, 'WORKERS')\n"
        "    except Exception as error: print(error)\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, check=True)
    assert ended.stdout.decode().splitlines() == [
        "100 200",
        "150 200",
        "WORKERS needs 201 open files, and this machine's hard limit is 200: raise the limit "
        "(ulimit -Hn), or lower WORKERS",
        "150 200",
    ]


def test_an_answer_that_nobody_waits_for_any_more_is_no_error() -> None:
    script = (
        "import os, socket\n"
        "from types import SimpleNamespace\n"
        "from penstock.common.sandbox import body, frames\n"
        "ours, theirs = socket.socketpair()\n"
        f"ours.sendall(frames.pack_request({{'work': '{WORK}:echo', 'arguments': [1]}}))\n"
        "ours.close()\n"
        "limits = SimpleNamespace(memory_bytes=1 << 40, processes=0)\n"
        "body._call([theirs.detach(), os.dup(2)], limits)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
