"""Rewards that go wrong, and healthy ones, for the scoring processes of the tests to import."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def length_in_letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """What a healthy reward looks like."""
    return [float(len(completion)) for completion in completions]


def picky(transcripts: list[Any], environment_reward: list[float], **columns: Any) -> list[float]:
    """Fails for the answer `bad`, and without its arguments."""
    assert all(talk[-1]["content"] != "bad" for talk in transcripts), "a bad answer"
    return [reward + 0.5 for reward in environment_reward]


def show_arguments(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """1.0 where prompt, completion and every column arrived as promised."""
    return [
        float(columns["answer"] == ["4"] * 2 and columns["solution"] == ["4"] * 2)
        * float(prompts == ["Q?"] * 2),
        2.0 * float(completions == ["4", "5"] and columns["completion_ids"] == [[21, 0], [22, 0]]),
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
    return length_in_letters(prompts, completions)


def slow(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    time.sleep(0.3)
    return length_in_letters(prompts, completions)


def wait_for_files(
    prompts: list[str], completions: list[str], folder: list[str], count: list[int], **columns: Any
) -> list[float]:
    """Makes a file in the folder, and returns when the folder holds `count` files."""
    tempfile.mkstemp(dir=folder[0])
    while len(os.listdir(folder[0])) < count[0]:
        time.sleep(0.01)
    return length_in_letters(prompts, completions)


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


def spin(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    while True:
        pass


def bad_for_five(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Segfaults on `five`; compares what is left."""
    if "five" in completions:
        ctypes.string_at(0)
    longest = max(len(completion) for completion in completions)
    return [len(completion) / longest if longest else 0.0 for completion in completions]


def fork_bomb(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    while True:
        os.fork()


def fork_and_return(
    prompts: list[str], completions: list[str], marker: list[str], **columns: Any
) -> list[float]:
    """Leaves a process behind, its number in the file `marker`."""
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    Path(marker[0]).write_text(str(child))
    return length_in_letters(prompts, completions)


def fork_out_of_reach(
    prompts: list[str], completions: list[str], marker: list[str], **columns: Any
) -> list[float]:
    """Leaves a daemon behind: in a session of its own, its parent gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(marker[0]).write_text(str(os.getpid()))
            time.sleep(3600)
        os._exit(0)
    while not (Path(marker[0]).exists() and Path(marker[0]).read_text()):
        time.sleep(0.01)
    return length_in_letters(prompts, completions)


def forget_a_timer(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """As verifiers do whose time limit is not cleared when they return early."""

    def strike(*_: Any) -> None:
        raise TimeoutError("late")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.01)
    return length_in_letters(prompts, completions)


def fork_and_hang(
    prompts: list[str], completions: list[str], marker: list[str], **columns: Any
) -> list[float]:
    fork_and_return(prompts, completions, marker)
    return hang(prompts, completions)


def show_environment(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Number of secrets it can see; raises its user's number if asked for `uid`."""
    if completions == ["uid"]:
        return [float(os.getuid())]
    seen = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            started_with = file.read()
    except PermissionError:
        started_with = b""
    return [float("A_SECRET" in seen) + float(b"A_SECRET" in started_with)] * len(completions)


def changes_the_first(completions: list[str], cases: list[list[list[int]]], **_: Any) -> list[float]:
    """Adds to the cases of the first completion, and counts those of each."""
    cases[0][0].append(3)
    return [float(len(one[0])) for one in cases]


def logs_all(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
    """Logs as many columns as it may."""
    for number in range(1024):
        log_extra(f"column{number}", [0] * len(completions))
    return [0.0] * len(completions)


def logs(
    prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **columns: Any
) -> list[float]:
    """Uses TRL's two ways to log."""
    log_extra("shouted", [completion.upper() for completion in completions])
    log_extra("parsed", [10**30 for _ in completions])
    log_metric("letters", float(sum(map(len, completions))))
    return length_in_letters(prompts, completions)


def logs_surrogates(
    prompts: list[str], completions: list[str], log_extra: Any, log_metric: Any, **columns: Any
) -> list[float]:
    """What json.loads makes of a model's text may hold half a character."""
    log_extra("half \ud800", ["\ud800" for _ in completions])
    log_metric("half \ud800", 1.0)
    return length_in_letters(prompts, completions)


def raise_surrogates(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    raise ValueError("half \ud800")


def logs_too_few(
    prompts: list[str], completions: list[str], log_extra: Any, **columns: Any
) -> list[float]:
    log_extra("shouted", [])
    return length_in_letters(prompts, completions)


def spread_of_letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Compares completions, so that one alone is too few; and one text is too bad for it."""
    if "five" in completions:
        raise ValueError("five is bad")
    if len(completions) < 2:
        raise ValueError("at least 2 completions are needed")
    return length_in_letters(prompts, completions)


def nothing(prompts: list[str], completions: list[str], **columns: Any) -> None:
    return None
