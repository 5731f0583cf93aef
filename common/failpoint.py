"""Named places where a test makes a process die as by kill -9; without effect in normal runs.

    PENSTOCK_FAILPOINT=handoff.after:3 actor      dies at the third hand-off, done and not yet noticed

A process that is started again with the same environment dies again, unless PENSTOCK_FAILPOINT_FIRED
names a file: it is made at the death, and where it exists the place is harmless.

Every command to the queue server has two places, before and after it (common/broker/connection.py); the
journal, files that are written aside and the learner's Update have some of their own.
"""

import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from penstock.common.errors import ConfigError


@dataclass(slots=True)
class Armed:
    """Where to die: at the passage with this number, counted from 1; once, if `fired` is a file.

    Or to stop, with SIGSTOP as the signal.
    """

    name: str
    passage: int = 1
    fired: Path | None = None
    signal: int = signal.SIGKILL
    passed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_by(self, name: str) -> None:
        """Count a passage, or die."""
        if name != self.name:
            return
        with self.lock:
            self.passed += 1
            if self.passed != self.passage or (self.fired and self.fired.exists()):
                return
            if self.fired:
                self.fired.touch()
            os.kill(os.getpid(), self.signal)


_armed: Armed | None = None


def failpoint(name: str) -> None:
    """A place to die."""
    if _armed is not None:
        _armed.pass_by(name)


def arm(armed: Armed | None) -> None:
    """Make one place of this process deadly, in place of any other."""
    global _armed  # noqa: PLW0603 - a place is anywhere in the process
    _armed = armed


def _from_environment() -> Armed | None:
    """Read at import, before there is anybody to catch an error: a bad value ends the process here."""
    text = os.environ.get("PENSTOCK_FAILPOINT", "")
    name, colon, passage = text.partition(":")
    if text and not (name and (not colon or (passage.isdecimal() and int(passage) > 0))):
        print(
            f"PENSTOCK_FAILPOINT={text}: expected a place, or a place and the number of the passage, "
            "counted from 1, such as handoff.after:3",
            file=sys.stderr,
        )
        sys.exit(ConfigError.exit_code)
    fired = os.environ.get("PENSTOCK_FAILPOINT_FIRED")
    return Armed(name, int(passage or 1), Path(fired) if fired else None) if name else None


arm(_from_environment())
