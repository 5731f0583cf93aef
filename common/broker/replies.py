"""What a refusal of the queue server means: one of Penstock's errors, or a wait until it passes."""

import re

from penstock.common.errors import (
    CommandRefused,
    ConfigError,
    NotPermitted,
    RunNotReady,
    RunTaken,
    WrongType,
)
from penstock.common.text import short

_NO_RIGHT = re.compile(r"ACL failure in script|user executing the script can't")
"""Texts of Valkey and of Redis for a command inside of a function that the caller may not send."""

_NO_ID_LEFT = "exhausted the last possible ID"
"""Text for an XADD to a stream that another client gave an entry with the largest id."""

_STREAM_GONE = re.compile("^NOGROUP|^UNBLOCKED the stream key no longer exists")
"""The second if the stream is deleted during a blocking read, in Redis 7.0."""

PASSING = {
    "OOM": "its memory is full",
    "MISCONF": "it cannot save to its disk",
    "BUSY": "a script of another client runs there",
    "READONLY": "it is a replica and takes no writes",
    "NOREPLICAS": "it has fewer replicas than it needs to take a write",
    "MASTERDOWN": "it is a replica that lost its master",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its cluster moves keys",
    "LOADING": "it loads its data",
    "UNBLOCKED": "it became a replica during a blocking read",
}
"""By code, the refusals that end by themselves. Any user who may call a function can make the server
BUSY for seconds; memory and disk are freed; after a failover, another server has the address."""

_PASSING_TEXT = re.compile("^(?:ERR )?max number of clients|Script killed by user with FUNCTION KILL")
_ABORTED = re.compile(r"because of:? *([A-Z]+)")


def code_of(error: Exception) -> str:
    """Return the first word of the server's refusal, redis-py's ResponseError, such as "READONLY".

    redis-py cuts it off the text of some errors. Of a transaction that the server gave up (EXECABORT) it
    is the word of the cause.
    """
    known: str = getattr(error, "status_code", None) or "ERR"
    code = str(error).partition(" ")[0] if known == "ERR" else known
    if code == "EXECABORT" and (cause := _ABORTED.search(str(error))):
        return cause[1]
    return code


def explain(error: Exception) -> str:
    """Return what a failed command says of the server: its text, for a known refusal its meaning too."""
    known = PASSING.get(code_of(error))
    return f"{code_of(error)}, {known} ({error})" if known else str(error)


def raise_unless_passing(error: Exception, address: str) -> None:
    """Raise the error that the server's refusal of a command means; return only if waiting helps.

    RunTaken: another learner holds the run. ConfigError: a run of this name from another folder.
    WrongType: a key of another type, or a stream that takes no more entries. RunNotReady: the learner
    has not set the run up, or a stream is gone. NotPermitted: the user lacks the right. CommandRefused:
    any other refusal. Waiting helps for PASSING and few others. `address` is for the messages.
    """
    code = code_of(error)
    message = short(error, 1000).partition(" ")[2]  # another client may have named the holder
    if code == "FENCED":
        raise RunTaken(
            f"{message} and continues the run: this learner was superseded and stops. To go on with "
            "this one, stop the other learner and start this one again"
        ) from error
    if code == "TAKEN":
        raise RunTaken(
            f"queue server {address} has a learner: {message}. Once it is gone, start this learner again"
        ) from error
    if code == "FOREIGN":
        raise ConfigError(
            f"the queue server {address} refuses this run: {message}: choose another RUN_NAME or "
            "another server, or delete that run with `queues discard`"
        ) from error
    if code == "WRONGTYPE" or _NO_ID_LEFT in str(error):
        raise WrongType(
            f"{error} (on the queue server {address}): another client wrote there. "
            "The learner deletes and restores the key; start it if it does not run, and see who may "
            "write to the queue server"
        ) from error
    if code == "NOTREADY":
        raise RunNotReady(
            f"queue server {address}: {message}. Start `learner`, or wait until it sets the run up"
        ) from error
    if _STREAM_GONE.search(str(error)) or "Function not found" in str(error):
        raise RunNotReady(
            f"the learner has not set the run up on {address} yet: start `learner`"
        ) from error
    if code == "NOPERM" or _NO_RIGHT.search(str(error)):
        raise NotPermitted(
            f"the queue server {address} refuses this user: {error}. Set REDIS_URL to the URL of this "
            "role's user, or let an operator run `queues acl`"
        ) from error
    if code not in PASSING and not _PASSING_TEXT.search(str(error)):
        found = f"the queue server {address} refused a command: {error}"
        raise CommandRefused(f"{found}. {_remedy_for(f'{code} {error}')}") from error


def _remedy_for(refusal: str) -> str:
    """Return what to do about a refusal of an unknown meaning."""
    if re.search("^(?:MOVED|ASK|CROSSSLOT)|unknown command", refusal):
        return "Set REDIS_URL to a Redis or Valkey server that is no cluster"
    return "See the server's log, and who else writes to it"
