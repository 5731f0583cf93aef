"""One tree of errors, and the exit code each one ends a process with.

    PenstockError                1   the code of all errors below without their own
    ├── ConfigError             78   settings, server or contract cannot work; never restarted
    │   └── ContractMismatch    78   this process disagrees with what the learner published
    ├── DataError               65   a data set cannot be read; never restarted
    ├── RunTaken                73   another learner holds the run, or has taken it over; never restarted
    ├── ServerUnavailable       69   the queue server did not answer within its deadline
    ├── RunNotReady             75   the learner has not set the run up on the server (yet)
    ├── DeadlineExceeded        81   a wait reached its limit; never restarted
    ├── NoSignal                79   too many groups in a row gave no signal; never restarted
    ├── NotFinite               80   NaN or infinity in every retry; never restarted
    ├── DiskFull                74   the disk was full for too long; never restarted
    ├── MalformedMessage        76   bytes do not match the wire schema
    └── EngineFailed            70   the inference engine failed

The numbers are those of sysexits.h, 79, 80 and 81. A process that was told to stop exits with 0,
or with 69 if it could not acknowledge its work because the queue server was away.
"""

from collections.abc import Sequence
from typing import Any


class PenstockError(Exception):
    """Base of all errors that a user may see. The text says what was found and what to do."""

    exit_code = 1


class ConfigError(PenstockError):
    """Settings, a server or a contract that cannot work: a restart would fail in the same way."""

    exit_code = 78


class ContractMismatch(ConfigError):
    """This process has other data, such as a tokenizer, than the learner published for the run."""


class DataError(PenstockError):
    """A data set that cannot be read: a missing column, an unreadable line."""

    exit_code = 65


class RunTaken(PenstockError):
    """Another learner holds the run: its lease is valid, or its incarnation is newer than this one."""

    exit_code = 73


class ServerUnavailable(PenstockError):
    """The queue server did not answer within the timeout."""

    exit_code = 69


class RunNotReady(PenstockError):
    """The learner has not set the run up on this server, or the server was emptied."""

    exit_code = 75


class DeadlineExceeded(PenstockError):
    """A wait reached its limit. The text says which process was waited for.

    The process is not restarted: it would only wait as long once more, and the run would never end.
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
    """NaN or infinity in the training. A restart would train the same batches and fail again."""

    exit_code = 80


class DiskFull(PenstockError):
    """The disk, or its quota, was full for too long. Files written before are whole."""

    exit_code = 74


class MalformedMessage(PenstockError):
    """Bytes, or a text, that are not a message, version or ticket id of this wire schema."""

    exit_code = 76


class EngineFailed(PenstockError):
    """The inference engine failed and cannot continue."""

    exit_code = 70


NEVER_RESTARTED = frozenset(
    kind.exit_code
    for kind in (ConfigError, DataError, DeadlineExceeded, RunTaken, NoSignal, NotFinite, DiskFull)
)
"""Exit codes after which starting the process again cannot help."""
