"""A sandbox process runs any function that can be pickled, and survives what the function does."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator

import pytest

from penstock.common.sandbox.pool import SandboxPool, SandboxSettings
from penstock.common.sandbox.process import Mistake


def settings(**changes: object) -> SandboxSettings:
    values = {"timeout_s": 5.0, "memory_gib": 1.0, "user": "", "environment": (), "preload": ()}
    return SandboxSettings(**({"workers": 1, "section": "SOLVER"} | values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(settings()) as pool:
        yield pool


def test_a_function_runs_in_another_process(pool: SandboxPool) -> None:
    assert pool.run(math.gcd, 12, 18) == 6
    assert pool.run(os.getpid) not in (os.getpid(), None)


def test_an_exception_comes_back_as_text(pool: SandboxPool) -> None:
    assert pool.run(math.sqrt, -1.0) == Mistake("ValueError: math domain error")


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_caller(pool: SandboxPool) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.run(memoryview, b"text")
    assert pool.run(math.gcd, 12, 18) == 6


def test_the_settings_of_the_section_are_named(pool: SandboxPool) -> None:
    outcome = pool.run(bytearray, 8 << 30)
    assert outcome == Mistake("needs more memory than SOLVER_MEMORY_GIB=1 allows")
    assert pool.run(os._exit, 3) == Mistake("killed its process (exit code 3)")


def test_a_call_is_killed_at_its_time_limit() -> None:
    with SandboxPool(settings(timeout_s=0.3)) as pool:
        assert pool.run(time.sleep, 3600.0) == Mistake("took more than 0.3 s")
        assert pool.finished == 1
