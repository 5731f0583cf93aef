"""The errors that a user may see. The class of an error names the exit code of a process that it ends.

The codes are those of sysexits.h, and 79 to 82. A process that was told to stop exits with 0, or with
69 if it could not acknowledge its work because the queue server was away.
"""

from collections.abc import Sequence
from typing import Any


class PenstockError(Exception):
    """Base of all errors that a user may see. The text says what was found and what to do."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        """Set `exit_code`, that of a process which the new subclass ends; None or 0: its base's code."""
        cls.exit_code = exit_code or cls.exit_code


class ConfigError(PenstockError, exit_code=78):
    """Settings, a server or a contract that cannot work: a restart would fail in the same way."""


class NotPermitted(ConfigError):
    """A command, or a key, that the queue server refuses to this user."""


class ContractMismatch(ConfigError):
    """This process has other data, such as a tokenizer, than the learner published for the run."""


class DataError(PenstockError, exit_code=65):
    """A data set that cannot be read: a missing column, an unreadable line."""


class ValueTooLarge(DataError):
    """A value that is larger than the queue server takes, refused before it was sent."""


class RunTaken(PenstockError, exit_code=73):
    """Another learner holds the run: its lease is valid, or its incarnation is newer than this one."""


class ServerUnavailable(PenstockError, exit_code=69):
    """A queue server, hub, file server or object store did not answer in time, or refused a request."""


class CommandRefused(ServerUnavailable):
    """The queue server answered, and refused the command for a reason that has no error of its own."""


class RunNotReady(PenstockError, exit_code=75):
    """The learner has not set the run up on this server, or the server was emptied."""


class DeadlineExceeded(PenstockError, exit_code=81):
    """A wait reached its limit. The text says which process was waited for.

    The process is not restarted: it would only wait as long once more, and the run would never end.
    """


class NoSignal(PenstockError, exit_code=79):
    """Too many groups of rollouts in a row had nothing to learn from. `text` is the error's message.

    The attribute `filtered` has the verdicts of those groups whose rewards were equal, by default none.
    """

    def __init__(self, text: str, filtered: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.filtered = filtered


class NotFinite(PenstockError, exit_code=80):
    """NaN or infinity in the training. A restart would train the same batches and fail again."""


class DiskFull(PenstockError, exit_code=74):
    """The disk, or its quota, was full for too long. Files written before are whole."""


class DiskFailed(PenstockError, exit_code=71):
    """A disk that cannot be read or written, as it broke or its mount is gone. A restart may help."""


class WrongType(RunNotReady):
    """A key of the run is of another type than expected. The learner deletes and restores the key."""


class MalformedMessage(PenstockError, exit_code=76):
    """Bytes, or a text, that are not a message, version or ticket id of this wire schema."""


class OtherRelease(MalformedMessage, exit_code=ConfigError.exit_code):
    """A message of another wire schema. All processes of a run must be of releases with the same one."""


class EngineFailed(PenstockError, exit_code=70):
    """The inference engine failed and cannot continue."""


class Disagreement(PenstockError, exit_code=82):
    """Engine and trainer compute other log-probabilities with the same weights."""


NEVER_RESTARTED = frozenset(
    kind.exit_code
    for kind in (
        ConfigError,
        DataError,
        DeadlineExceeded,
        RunTaken,
        NoSignal,
        NotFinite,
        DiskFull,
        Disagreement,
    )
)
"""Exit codes after which starting the process again cannot help."""

FLEET_NEVER_RESTARTED = NEVER_RESTARTED - {DeadlineExceeded.exit_code}
"""Exit codes after which a process of a run on several machines is not started again.

81 is missing: whoever was waited for may still come, or come back.
"""
