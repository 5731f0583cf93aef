"""The users of a run on its queue server: one per role, each with what the role needs and no more.

A server function runs with the rights of the user who calls it: its commands are checked as if the user
had sent them, and a call needs read and write rights for each key that it names. So the rights to call a
function stand in a selector of their own, which names the fence too: the call is allowed, and the
function can only read the fence.

Example: `put` called by an actor is refused, as the contract is no key of the actor's calls. `claim`
names the fence alone, so the call begins, and its HSET on the fence is refused.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import hash_password
from penstock.common.config.redis_url import parse_url, with_login
from penstock.common.config.secret_file import read_secret
from penstock.common.errors import CommandRefused, ConfigError
from penstock.common.files.atomic import make_folder, write_whole
from penstock.common.files.run_folder import RunFolder

Role = Literal["learner", "actor", "rewarder", "reader"]
ROLES: tuple[Role, ...] = get_args(Role)
"""The roles that have a user. `reader` is for `queues status`, `audit`, `watch` and `dead`."""

_READING = (
    "ping", "select", "info", "time", "get", "hget", "hmget", "hgetall", "exists", "type", "xlen",
    "xrange", "xrevrange", "xpending", "xinfo|groups", "xinfo|consumers", "hscan", "hlen",
    "fcall_ro|penstock_4_audit",
)  # fmt: skip
_WORKING = ("xack", "xdel", "xclaim", "xadd", "xgroup|delconsumer", "hset")
_COUNTING = ("hget", "hdel", "hincrby", "type")
_LEARNING = (
    *_WORKING,
    *_COUNTING,
    "xreadgroup",
    "xgroup|create",
    "xinfo|stream",
    "set",
    "del",
    "function|list",
    "fcall",
    "fcall_ro",
)
_LEASE_CALLS = (
    "mark_alone",
    "put_back",
    "renew",
    "leases",
    "reclaim",
    "held",
    "drop",
    "remove_consumer",
)


@dataclass(frozen=True, slots=True)
class User:
    """A user that was written, and the file with its URL."""

    role: Role
    name: str
    file: Path


def user_name(run: str, role: Role) -> str:
    """Return the name of a role's user on the queue server: "penstock-demo-actor" for run "demo"."""
    return f"penstock-{run}-{role}"


def rules(role: Role, keys: Keys) -> list[str]:
    """Return the arguments of ACL SETUSER that let a role do its work on the run with these keys.

    A reader may read all keys; the learner may read and write them. An actor or a rewarder may read the
    run, change its work streams and `open`, add groups, results and dead tickets, count malformed
    entries and costs, tell of themselves, and call the server functions for that. The arguments allow
    commands ("+get") and keys ("~KEY") and take no right away: the caller resets the user first.
    """
    if role == "reader":
        return [*_allow(_READING), *(f"%R~{key}" for key in keys.all)]
    if role == "learner":
        of_deltas = _selector(["hkeys", "expire"], [keys.deltas])
        return [*_allow(_READING, _LEARNING), *(f"~{key}" for key in keys.all), of_deltas]
    return _worker_rules(keys, actor=role == "actor")


def _worker_rules(keys: Keys, actor: bool) -> list[str]:
    """Return the ACL rules of an actor, or if not `actor` of a rewarder, on the run with these keys.

    Rights: change `open` and own streams (tickets, eval_tickets, or rollouts); add to rollouts (actor),
    scored, evaluated and dead; count in malformed and costs; tell of themselves in processes, and a
    `penstock up` in supervisors; read the other keys; call the functions for this.
    """
    worked = (keys.tickets, keys.eval_tickets) if actor else (keys.rollouts,)
    following = (keys.rollouts,) if actor else keys.outcome_streams
    ends = (*keys.outcome_streams, keys.dead)  # of a ticket that failed too often
    streams = (*keys.work_streams, *keys.outcome_streams)
    known = (*streams, keys.ledger, keys.fence, keys.contract, keys.weights, keys.state)
    known += (keys.scale, keys.deltas) if actor else (keys.scale,)
    return [
        *_allow(_READING, _WORKING), *(f"~{key}" for key in (*worked, keys.open)),
        *(f"%R~{key}" for key in known if key not in worked),
        _selector(["xreadgroup"], worked),  # needs no more than the right to read, and takes entries
        _selector(["xadd"], dict.fromkeys((*following, *ends)), "%W~"),
        _selector(_COUNTING, [keys.malformed]), _selector(["hincrbyfloat"], [keys.costs]),
        _selector(["hset", "hdel"], [keys.processes, keys.supervisors]),
        _selector(["type"], [keys.dead], "%R~"),
        _selector(_calls("handoff"), (keys.fence, keys.open, *worked, *following)),
        _selector(_calls("bury"), (keys.fence, keys.open, *worked, *ends)),
        _selector(_calls(*_LEASE_CALLS), (keys.fence, keys.open, keys.malformed, *worked)),
    ]  # fmt: skip


def write_users(connection: Connection, url: str, run: str, folder: Path) -> tuple[list[User], bool]:
    """Load the server functions, create a run's users, and write a file with a URL per role to a folder.

    `connection` is an operator's. `url` is the server's URL; each user's login replaces the login in it.
    `folder`, created with mode 0700 if missing, gets learner.url, actor.url, rewarder.url and reader.url
    with mode 0600. A user whose file exists keeps the password in the file, with a warning on standard
    error if others may read or change the file; other users get a random password. Older rights of the
    users are taken away.

    Return the users in this order, and whether the server stored them for its next start. Raise
    ConfigError without the rights of an operator, for a folder that cannot be made or a malformed file,
    OSError if a file cannot be written, and ServerUnavailable if the server does not answer.
    """
    connection.load_functions()
    if not folder.exists():
        make_folder(folder, "--out")
        folder.chmod(0o700)
    users = []
    for role in ROLES:
        user = User(role, user_name(run, role), folder / f"{role}.url")
        password = _kept_password(user.file) or secrets.token_hex(24)
        everything = ["reset", "on", f"#{hash_password(password)}", "resetchannels", "-@all"]
        connection.execute("ACL", "SETUSER", user.name, *everything, *rules(role, Keys(run)))
        line = f"{with_login(url, user.name, password)}\n"
        write_whole(user.file, line.encode(), mode=0o600)
        users.append(user)
    return users, _saved(connection)


def _allow(*groups: Sequence[str]) -> list[str]:
    """Return the ACL rules that allow the commands of all `groups`, in order: "+get" for "get"."""
    return [f"+{name}" for group in groups for name in group]


def _calls(*names: str) -> list[str]:
    """Return the names of calls of these functions in ACL rules: "fcall|penstock_4_bury" for "bury"."""
    return [f"fcall|penstock_4_{name}" for name in names]


def _selector(commands: Sequence[str], keys: Iterable[str], right: str = "~") -> str:
    """Return an ACL selector, which adds the right to send `commands` on `keys` to other rights.

    `right` stands before each key: "~" to read and write, "%R~" to read, "%W~" to write. Example:
    ["type"], ["k"] and "%R~" give "(-@all +type %R~k)".
    """
    return f"({' '.join(['-@all', *_allow(commands), *(f'{right}{key}' for key in keys)])})"


def _kept_password(file: Path) -> str | None:
    """Return the password of the URL in a role's file; None without a file or a password.

    Warn on standard error if others may read or change the file. Raise ConfigError, which names the
    file, if the file cannot be read or holds no URL.
    """
    if not file.exists():
        return None
    try:
        return parse_url(read_secret(file, "queues acl")).password
    except ConfigError as error:
        raise ConfigError(
            f"{file}: {error}. Delete the file and run `queues acl` again for a new password"
        ) from None


def _saved(connection: Connection) -> bool:
    """Let the server write its users to its aclfile, and return True.

    Return False if the server has no aclfile, or cannot write it. Raise ConfigError if this user may not
    save, ServerUnavailable if the server does not answer within its timeout.
    """
    try:
        connection.execute("ACL", "SAVE")
    except CommandRefused:
        return False
    return True


def default_folder(run_folder: RunFolder) -> Path:
    """Return the folder for the files with URLs if none is named: queue/users in the run's folder."""
    return run_folder.server / "users"
