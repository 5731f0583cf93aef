"""Size, limits and code of a pool, and the error of a pool that cannot start."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.common.errors import PenstockError

MOST_CODES = 8
"""Codes of which a worker keeps a process. The least recently used one is ended for another one."""
_CHILDREN = 64
_POOLS = 4


class SandboxFailed(PenstockError):
    """A sandbox process could not be started: it was killed at every attempt, or not ready in time."""


class Code(NamedTuple):
    """A user's code: where it is, and the digest that it must have.

    `more` has source and digest of further code that the same process imports after it.
    """

    source: str
    digest: str
    more: tuple[tuple[str, str], ...] = ()

    @property
    def all(self) -> list[tuple[str, str]]:
        """Return (source, digest) of this code, and then of each code in `more`, in a new list."""
        return [(self.source, self.digest), *self.more]


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Size and limits of a pool.

    `environment` names variables that the processes inherit beside PATH and the like. `modules` are
    imported before any process starts. `built_in` names a function, "package.module:function", that is
    called before calls without a user's code are served, and imports all that they need. `load` names
    the function that imports a user's code, called with source and digest. `section` is the prefix of
    the settings in error messages: with "REWARDER", a call without enough memory names
    REWARDER_MEMORY_GIB.
    """

    workers: int
    timeout_s: float
    memory_gib: float
    user: str
    environment: tuple[str, ...]
    modules: tuple[str, ...]
    built_in: str
    load: str
    section: str

    @property
    def most_processes(self) -> int:
        """Return how many processes and threads the sandbox's user may run here, in all pools together.

        The kernel counts those of all pools with the same user, so the number suffices for four pools of
        this size, each with 64 processes that calls start. Example: 4 x (16 x 10 + 64) = 896 for 16
        workers, each of which has at most a built-in process, eight processes with codes, and a call.
        """
        return _POOLS * (self.workers * (MOST_CODES + 2) + _CHILDREN)
