"""Named places where a test kills the process, as by kill -9. Without effect in normal runs.

    PENSTOCK_FAILPOINT=handoff.after:3 actor      kills the actor after its third handoff

A process that is started again with the same environment is killed again, unless
PENSTOCK_FAILPOINT_FIRED names a file. The kill creates the file, and a process that finds it is not
killed. Every command to the queue server has two places, before and after (common/broker/connection.py).
The journal, atomic files and the learner's Update have places of their own.
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
    """A place at which the process gets a signal, at the passage with this number, counted from 1.

    With a file `fired`, the signal is sent only once: the file is created, and prevents the next one.
    """

    name: str
    passage: int = 1
    fired: Path | None = None
    signal: int = signal.SIGKILL
    passed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_by(self, name: str) -> None:
        """Count a passage of the place `name` in `passed` if it is this object's place, else do nothing.

        At the passage with the number `passage` send this process `signal`, after creating the file
        `fired` if one is given. If that file exists already, send nothing.
        """
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
    """Mark the place `name` in the code. If a test armed this place, count the passage.

    At the passage with the armed number, the armed file, if there is one, is created and the process
    gets the armed signal, SIGKILL by default; no signal if the file existed. Without an armed place, or
    with another one armed, nothing happens.
    """
    if _armed is not None:
        _armed.pass_by(name)


def arm(armed: Armed | None) -> None:
    """Arm one place of this process instead of the place armed before. None disarms.

    `armed` has the place's name, the number of the passage (from 1), the signal that the process gets
    there, and perhaps a file, which is created then and prevents a second signal.
    """
    global _armed  # noqa: PLW0603 - a place is anywhere in the process
    _armed = armed


def _from_environment() -> Armed | None:
    """Return the place that PENSTOCK_FAILPOINT=NAME or NAME:PASSAGE names, None if it is unset or empty.

    The passage is 1 by default, the signal SIGKILL. PENSTOCK_FAILPOINT_FIRED, if set, is the place's
    file `fired`. For a malformed value, such as ":3" or "handoff.after:0", print the mistake on standard
    error and exit with code 78: this runs at import, where no caller can catch an error.
    """
    text = os.environ.get("PENSTOCK_FAILPOINT", "")
    name, colon, passage = text.partition(":")
    if text and not (name and (not colon or (passage.isdecimal() and int(passage) > 0))):
        form = "a place, or a place and the number of the passage, counted from 1"
        print(f"PENSTOCK_FAILPOINT={text}: expected {form}, such as handoff.after:3", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    fired = os.environ.get("PENSTOCK_FAILPOINT_FIRED")
    return Armed(name, int(passage or 1), Path(fired) if fired else None) if name else None


arm(_from_environment())
