"""What runs inside a scoring process: one reward on one group, within its limits, nothing hidden.

Whatever goes wrong goes back as text. An exception itself would have to be pickled, and one that
cannot be unpickled takes the whole pool down.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

from penstock.common.text import encodable
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.load import load_reward
from penstock.rewarders.user import become

OUT_OF_MEMORY = 77
"""Exit code of a scoring process that met its memory limit."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER

_EXTRA_BYTES = 2**20
"""What a reward logs for one group is text for people: more than this is a mistake."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scoring process may use, who it is (-1: whoever starts it), and what it sees.

    `names` is a folder where each process leaves a file named after itself.
    """

    memory_bytes: int
    processes: int
    uid: int
    gid: int
    names: str


@dataclass(frozen=True, slots=True)
class Scores:
    """What one reward says of one group: G values, and what it logged."""

    values: tuple[float | None, ...]
    extra: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mistake:
    """Why there are no scores."""

    reason: str


def prepare(limits: Limits) -> None:
    """Set up a new scoring process."""
    # A SIGTERM to the process group is for the rewarder, which finishes what it holds.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(limits.names) / str(os.getpid())).touch()
    os.setpgid(0, 0)  # what a reward starts can be killed by this group's number
    _limit(resource.RLIMIT_AS, limits.memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    if limits.uid >= 0:
        become(limits.uid, limits.gid)
        _limit(resource.RLIMIT_NPROC, limits.processes)  # root would not be held by it
    if sys.platform == "linux":  # after setuid, which forgets it
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (bound, bound))


def ready(memory_bytes: int) -> bool:
    """Whether the process started with room to work in."""
    return not _came_near(memory_bytes)


def check_reward(spec: RewardSpec) -> str:
    """Why a reward cannot be loaded here; empty if it can."""
    try:
        load_reward(spec)
    except BaseException as error:  # a user's module is run, and may raise anything
        return encodable(f"{type(error).__name__}: {error}")
    return ""


def call_reward(
    spec: RewardSpec, arguments: dict[str, list[Any]], memory_bytes: int
) -> Scores | Mistake:
    """Call a reward and check what it returns; ends the process when memory ran out.

    Processes that the reward started end with the call.
    """
    log = Log(len(arguments["completions"]))
    own_pid = os.getpid()
    try:
        reward = load_reward(spec)
        own = {"log_extra": log.log_extra, "log_metric": log.log_metric} if spec.source else {}
        values = checked_values(reward(**arguments, **own), log.size)
        outcome: Scores | Mistake = Scores(values, log.extra, log.metrics)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # rewards run on model text and may raise anything, SystemExit too
        outcome = Mistake(encodable(f"{type(error).__name__}: {error}"[:500]))
    if os.getpid() != own_pid:
        os._exit(0)  # the reward forked: only the scoring process itself may answer
    _clear_timers()
    _end_children()
    if _came_near(memory_bytes):
        os._exit(OUT_OF_MEMORY)
    return outcome


class Log:
    """TRL's log_extra and log_metric, for one call of a reward."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.extra: dict[str, tuple[Any, ...]] = {}
        self.metrics: dict[str, float] = {}

    def log_extra(self, column: str, values: list[Any]) -> None:
        """A column of the completions table, one value per completion; raises ValueError."""
        text = json.dumps(list(values), default=str, ensure_ascii=False)
        # A lone surrogate becomes a question mark, a number that no message can hold a text.
        plain = json.loads(text.encode("utf-8", "replace"), parse_int=_whole_number)
        if len(plain) != self.size:
            raise ValueError(
                f"log_extra({column!r}) has {len(plain)} values for {self.size} completions"
            )
        if len(json.dumps(plain)) > _EXTRA_BYTES:
            raise ValueError(f"log_extra({column!r}) is larger than {_EXTRA_BYTES} bytes")
        self.extra[encodable(str(column))] = tuple(plain)

    def log_metric(self, name: str, value: float) -> None:
        """A number, averaged over the groups of a step; raises ValueError if it is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}) is {value}")
        self.metrics[encodable(str(name))] = float(value)


def checked_values(values: Any, count: int) -> tuple[float | None, ...]:
    """A reward's values as plain floats; raises ValueError for anything but `count` finite ones."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise ValueError(f"expected a list of {count} values, found {str(values)[:80]}")
    return tuple(None if value is None else _finite(value) for value in values)


def _finite(value: Any) -> float:
    number = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    if not (isinstance(number, (Real, Decimal)) and math.isfinite(number)):
        kind = type(value).__name__
        raise ValueError(f"expected finite numbers or None, found {str(value)[:80]} ({kind})")
    return float(number)


def _whole_number(digits: str) -> int | str:
    number = int(digits)
    return number if -(2**63) <= number < 2**64 else digits


def _clear_timers() -> None:
    """A timer that one reward forgot would strike in the next one, and be taken for a wrong answer."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    for number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)


def _end_children() -> None:
    """Kill what the reward started: step out of the process group, kill it, step back in.

    On Linux also what left the group: orphans come to this process (see `prepare`).
    """
    own = os.getpid()
    os.setpgid(0, os.getpgid(os.getppid()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(own, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
    os.setpgid(0, 0)


def _children() -> list[int]:
    """This process's children; none where /proc does not tell."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += map(int, path.read_text().split())
    return found


def _came_near(memory_bytes: int) -> bool:
    """Whether this process once held a quarter of its limit.

    math_verify swallows MemoryError and answers "wrong". A number or list that grows until it fails
    was held at about a third of the limit just before; honest scorings stay far below.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory_bytes / 4
