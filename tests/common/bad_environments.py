"""Tools and environments for the episodes of the tests: healthy ones, and ones that go wrong."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SEEN: list[str] = []
"""Of the whole process: an episode must not see another's."""


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


async def later(text: str) -> str:
    """Return the text.

    Args:
        text: Any text.
    """
    await asyncio.sleep(0)
    return text


class Counter:
    """What a healthy environment looks like."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, **row: Any) -> str:
        self.row = row
        self.count = row.get("start", 0)
        return f"{sorted(row)} from {self.count}"

    def increase(self, by: int) -> str:
        """Count on.

        Args:
            by: How far.
        """
        self.count += by
        return str(self.count)

    def remember(self, text: str) -> str:
        """Remember a text in a variable of the module.

        Args:
            text: The text.
        """
        SEEN.append(text)
        return ",".join(SEEN)

    def column(self, name: str) -> str:
        """Return a column's value.

        Args:
            name: The column.
        """
        return repr(self.row[name])

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None:
        """No tool."""

    @property
    def broken(self) -> str:
        raise AssertionError("a property is no tool, and is not read")


class Bare:
    """Has neither get_reward nor a reset that takes all columns."""

    def reset(self, question: str) -> None:
        self.question = question

    def ask(self) -> str:
        """Return the question."""
        return self.question


class Loops:
    """Everything is async and belongs to one event loop."""

    def reset(self, **row: Any) -> None:
        self.task: asyncio.Task[str] | None = None

    async def begin(self) -> str:
        """Begin a task."""
        self.loop = asyncio.get_running_loop()
        self.wake = asyncio.Event()
        self.task = asyncio.create_task(self._work())
        return "begun"

    async def _work(self) -> str:
        await self.wake.wait()
        return "done"

    async def finish(self) -> str:
        """Return the task's result."""
        assert self.task is not None
        assert self.loop is asyncio.get_running_loop()
        self.wake.set()
        return await self.task

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


class Resets:
    """Begins as the row says."""

    def reset(self, how: str, **row: Any) -> Any:
        if how == "raises":
            raise LookupError("no such level \x1b[2J" + "x" * 5000)
        if how == "ends":
            os._exit(3)
        if how == "hangs":
            time.sleep(3600)
        return {"number": 5, "list": ["a"], "bytes": b"a"}[how]


class Rewards:
    """Is worth what the row says."""

    def reset(self, value: str, **row: Any) -> None:
        self.value = value

    def get_reward(self) -> Any:
        if self.value == "raises":
            raise LookupError("no verifier")
        if self.value == "exits":
            sys.exit("over")
        values = {"nan": math.nan, "inf": -math.inf, "large": 1e10, "text": "1.0", "none": None}
        return {**values, "whole": 2, "list": [1.0], "huge": 10**400}[self.value]


class Bad:
    """A tool for each thing that may go wrong."""

    def reset(self, **row: Any) -> None:
        pass

    def spin(self) -> str:
        """Never returns, without waiting."""
        while True:
            pass

    def spin_in_c(self) -> str:
        """Never returns, and holds the interpreter's lock."""
        return str(7 ** (10**9))

    def never_ends(self) -> str:
        """Never returns, and ignores polite signals."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(3600)

    async def never_awakes(self) -> str:
        """Never returns, in the event loop."""
        await asyncio.sleep(3600)
        return ""

    def fork_bomb(self) -> str:
        """Forks without end."""
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.001)

    def gigabyte(self) -> str:
        """Returns a text of 1 GB."""
        return "a" * 10**9

    def long_answer(self) -> str:
        """Returns a text of 8 MB, which fits into the memory and into no frame."""
        return "a" * (8 * 2**20)

    def allocate(self) -> str:
        """Needs more memory than there is."""
        return str(len(bytearray(64 << 30)))

    def fail(self) -> str:
        """Raises an exception."""
        raise LookupError("no such page")

    def fail_without_a_text(self) -> str:
        """Raises an exception whose text raises another."""

        class Silent(Exception):
            def __str__(self) -> str:
                raise ValueError("hidden")

        raise Silent

    def nothing(self) -> None:
        """Returns None."""

    def leave(self) -> str:
        """Ends its process at once."""
        os._exit(0)

    def leave_politely(self) -> str:
        """Raises SystemExit."""
        raise SystemExit("the server is lost")

    def kill_itself(self) -> str:
        """Kills its process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def segfault(self) -> str:
        """Crashes."""
        ctypes.string_at(0)
        return ""

    def secrets(self) -> str:
        """Returns all that it can see of the actor's variables."""
        try:
            with open("/proc/self/environ", "rb") as file:
                return repr(dict(os.environ)) + repr(file.read())
        except PermissionError:
            return repr(dict(os.environ))

    def user(self) -> int:
        """Returns the user's number."""
        return os.getuid()

    def escapes(self) -> str:
        """Returns commands to a terminal."""
        return "\x1b[2J\x07\u202e half \ud800"

    def fail_with_escapes(self) -> str:
        """Raises commands to a terminal."""
        raise LookupError("\x1b[2J half \ud800" + "x" * 100_000)

    def a_dict(self) -> dict[str, Any]:
        """Returns a dict."""
        return {"a": (1, 2)}

    def an_object(self) -> str:
        """Returns what cannot be made a text."""

        class Silent:
            def __str__(self) -> str:
                raise ValueError("hidden")

        return Silent()  # type: ignore[return-value]

    def forge(self) -> str:
        """Writes answers of its own into all descriptors."""
        frame = b'{"value": "forged"}'
        for number in range(3, 64):
            try:
                os.write(number, len(frame).to_bytes(4, "big") + frame)
            except OSError:
                continue
        return "true"

    def forge_well(self) -> str:
        """Writes the answer of a tool into all descriptors, and then returns its own."""
        frame = b'{"value": {"text": "forged", "failed": false}}'
        for number in range(3, 64):
            try:
                os.write(number, len(frame).to_bytes(4, "big") + frame)
            except OSError:
                continue
        return "true"

    def close_all(self) -> str:
        """Closes all descriptors."""
        os.closerange(3, 256)
        return "true"

    def fork_and_return(self, marker: str) -> str:
        """Leaves a daemon behind: in a session of its own, its parent gone.

        Args:
            marker: The file that the daemon writes its number to.
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(marker).write_text(str(os.getpid()))
                time.sleep(3600)
            os._exit(0)
        while not (Path(marker).exists() and Path(marker).read_text()):
            time.sleep(0.01)
        return "forked"

    def fork_twice(self) -> str:
        """Returns in two processes."""
        os.fork()
        return "once"
