"""Rewards that go wrong, and healthy ones, for the scoring processes of the tests to import."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """What a healthy reward looks like."""
    return [float(len(completion)) for completion in completions]


def show_arguments(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1.0 where prompt, completion and every column arrived as promised."""
    return [
        float(columns == {"question": ["Q?"] * 2, "answer": ["4"] * 2, "solution": ["4"] * 2})
        * float(prompts == ["2+2="] * 2),
        2.0 * float(completions == ["4", "5"]),
    ]


def hang(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(3600)
    return [0.0] * len(completions)


def hang_in_c(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Holds the interpreter lock and sees no signal handler run."""
    return [0.0 * (7 ** (10**9)) for _ in completions]


def hang_once(
    prompts: list[str], completions: list[str], marker: list[str], **columns: Any
) -> list[float]:
    """Hangs until the file `marker` exists, which it makes."""
    path = Path(marker[0])
    if not path.exists():
        path.touch()
        time.sleep(3600)
    return length(prompts, completions)


def slow(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.3)
    return length(prompts, completions)


def leave(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    os._exit(3)


def segfault(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    ctypes.string_at(0)
    return [0.0] * len(completions)


def raise_error(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    raise LookupError("no such verifier")


def system_exit(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    sys.exit(0)


def allocate(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(bytearray(8 << 30)))]


def swallow_memory_error(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """What math_verify does with 2^{10^{11}}."""
    try:
        number = bytes([1]) * (1 << 20)
        while True:
            number += number
    except MemoryError:
        return [0.0] * len(completions)


def not_a_number(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("nan")] * len(completions)


def infinite(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float("inf")] * len(completions)


def wrong_count(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * (len(completions) + 1)


def text(prompts: list[str], completions: list[str], **columns: Any) -> list[str]:
    return ["1.0"] * len(completions)


def nothing(prompts: list[str], completions: list[str], **columns: Any) -> None:
    return None


REWARDS = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__
}


def ready_at_last(marker: str, victim: Callable[[], int], memory_bytes: int) -> bool:
    """Stands in for `ready`: kills the victim, only once if there is a file `marker` to remember it."""
    path = Path(marker)
    if marker and path.exists():
        return True
    if marker:
        path.touch()
    os.kill(victim(), signal.SIGKILL)
    time.sleep(3600)
    return False
