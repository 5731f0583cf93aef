"""What can be killed: every process that lives below the supervisor, by kind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from penstock.deploy.child import Child

SERVER, LEARNER, ACTOR, REWARDER = "server", "learner", "actor", "rewarder"
SCORER, KEEPER, NURSERY, GUARD = "scoring process", "keeper", "nursery", "guard"
EPISODE = "episode"
KINDS = (SERVER, LEARNER, ACTOR, REWARDER, SCORER, KEEPER, NURSERY, GUARD, EPISODE)

_GUARD, _SANDBOX = "penstock.common.guard", "penstock.common.sandbox.nursery"


@dataclass(frozen=True, slots=True)
class Victim:
    """A live process: its kind, the child it belongs to such as "actor.1", its process id."""

    kind: str
    child: str
    pid: int

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """End it as kill -9 does, or by another signal; False if it had ended by itself."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def find_victims(children: Sequence[Child]) -> list[Victim]:
    """All live processes of these children, theirs included."""
    found = []
    for child in children:
        if (pid := child.pid) is None:
            continue
        name = child.service.name
        kind = SERVER if name == "queue" else name
        found.append(Victim(kind, child.name, pid))
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [
                Victim(EPISODE if (name, helper) == (ACTOR, SCORER) else helper, child.name, process.pid)
                for process in psutil.Process(pid).children(recursive=True)
                if (helper := helper_kind(process, pid))
            ]
    return found


def helper_kind(process: psutil.Process, role: int) -> str:
    """A nursery's forks have its command line: keepers, and below them the processes that score.

    Return "" for what is gone or not yet itself.
    """
    try:
        command, above = " ".join(process.cmdline()), [parent.pid for parent in process.parents()]
    except psutil.NoSuchProcess:
        return ""
    if _SANDBOX not in command:
        return GUARD if _GUARD in command else ""
    return (NURSERY, KEEPER, SCORER)[min(above.index(role), 2)] if role in above else ""
