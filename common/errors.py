"""One tree of errors, and the exit code each one ends a process with.

    PenstockError                1   anything below, unless it says otherwise
    ├── ConfigError             78   settings, server or contract that cannot work; never restarted
    │   └── ContractMismatch    78   this process disagrees with what the learner published
    ├── DataError               65   a data set that cannot be read; never restarted
    ├── RunTaken                73   another learner holds the run, or has taken it over; never restarted
    ├── ServerUnavailable       69   the queue server did not answer within its deadline
    ├── RunNotReady             75   the run's functions or streams are not there (yet)
    ├── DeadlineExceeded        81   a named wait ran out; never restarted
    ├── NoSignal                79   too many groups in a row had nothing to learn from; never restarted
    ├── NotFinite               80   NaN or infinity that does not go away; never restarted
    ├── DiskFull                74   no room on the disk for too long; never restarted
    ├── MalformedMessage        76   bytes that are not what the wire schema says
    └── EngineFailed            70   the inference engine broke

The numbers are those of sysexits.h, 79, 80 and 81. A process that was told to stop exits with 0,
or with 69 if it could not acknowledge its work because the queue server was away.
"""

from collections.abc import Sequence
from typing import Any


class PenstockError(Exception):
    """Base of every error a user can meet; its text says what was found and what to do."""

    exit_code = 1


class ConfigError(PenstockError):
    """Settings, a server or a contract that cannot work however often it is tried."""

    exit_code = 78


class ContractMismatch(ConfigError):
    """What this process has differs from what the learner published for the run."""


class DataError(PenstockError):
    """A data set that cannot be read: a missing column, an unreadable line."""

    exit_code = 65


class RunTaken(PenstockError):
    """Another learner holds the run's folder, or a newer incarnation fenced this one off."""

    exit_code = 73


class ServerUnavailable(PenstockError):
    """The queue server did not answer within its deadline."""

    exit_code = 69


class RunNotReady(PenstockError):
    """The learner has not set the run up on this server, or the server was emptied."""

    exit_code = 75


class DeadlineExceeded(PenstockError):
    """A named wait ran out; the text says who waited for what.

    Started again, a process would only wait as long once more, and the run would never end.
    """

    exit_code = 81


class NoSignal(PenstockError):
    """Too many groups in a row had nothing to learn from.

    `filtered` are the verdicts of the groups whose rewards had no spread.
    """

    exit_code = 79

    def __init__(self, text: str, filtered: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.filtered = filtered


class NotFinite(PenstockError):
    """NaN or infinity that does not go away: training from the same batches would meet it again."""

    exit_code = 80


class DiskFull(PenstockError):
    """The disk, or its quota, was full for too long; what was written before is whole."""

    exit_code = 74


class MalformedMessage(PenstockError):
    """Bytes that are not a message of this wire schema."""

    exit_code = 76


class EngineFailed(PenstockError):
    """The inference engine broke and cannot go on."""

    exit_code = 70


NEVER_RESTARTED = frozenset(
    kind.exit_code
    for kind in (ConfigError, DataError, DeadlineExceeded, RunTaken, NoSignal, NotFinite, DiskFull)
)
"""Exit codes after which starting the process again cannot help."""
