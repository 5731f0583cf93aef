"""The rights of sandbox processes: an unprivileged user where possible, and no capability."""

import ctypes
import errno
import os
import pwd
import sys
from pathlib import Path

from penstock.common.errors import ConfigError
from penstock.common.guard import MARK

KEPT = (
    "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "OMP_NUM_THREADS", MARK,
)  # fmt: skip
"""Environment variables that sandbox processes always inherit. None of them holds a password."""

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that are 1 unless kept: libraries then start no threads on import, and can be forked."""

_DUMPABLE, _DROP_BOUNDING, _NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_ALL = 4, 24, 38, 47, 4  # of prctl(2)
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of capset(2)
_SETGID, _SETUID, _LAST = 6, 7, 63  # of capabilities(7)
_KEYCTL, _JOIN_SESSION = {"x86_64": 250, "aarch64": 219}, 1  # by machine, of keyctl(2)
_UNUSED = (65_533, 65_532)
_LINUX = sys.platform == "linux"


def user_of(name: str, variable: str) -> tuple[int, int]:
    """Return the uid and gid of the user `name`, for sandbox processes; (-1, -1) keeps the present user.

    The present user is kept for an empty `name`, and where this process is not root. `variable` is the
    setting with the name, for errors. Raise ConfigError if this machine has no such user, or if on Linux
    this process lacks CAP_SETUID or CAP_SETGID.
    """
    if not name or os.geteuid() != 0:
        return -1, -1
    try:
        user = pwd.getpwnam(name)
    except KeyError as error:
        raise ConfigError(
            f"{variable}: there is no user {name!r} here; set it to an existing user, or to nothing "
            "to stay root"
        ) from error
    if _LINUX and (missing := _missing_capabilities()):
        raise ConfigError(
            f"{variable}={name}: root lacks {missing} here, so that the processes cannot become {name}; "
            f"add them (docker run --cap-add), start this as an ordinary user, or set {variable} to "
            "nothing to stay root"
        )
    return user.pw_uid, user.pw_gid


def unused_id(number: int) -> int:
    """Return 65533, or 65532 if `number` is 65533: ids that no user or group has a name for."""
    return next(unused for unused in _UNUSED if unused != number)


def _missing_capabilities() -> str:
    """Return which of CAP_SETUID and CAP_SETGID this process lacks, joined by " and "; "" if none.

    Only for Linux, where /proc tells the effective capabilities.
    """
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    needed = {"CAP_SETUID": _SETUID, "CAP_SETGID": _SETGID}
    return " and ".join(name for name, bit in needed.items() if not effective >> bit & 1)


def environment(kept: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables of sandbox processes, by name, with their present values.

    These are PATH, PYTHONPATH, LANG, TZ, OMP_NUM_THREADS and others of the tuple KEPT, and those that
    `kept` names, as far as they are set. OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and MKL_NUM_THREADS are
    "1" unless they are among them.
    """
    values = {name: os.environ[name] for name in (*KEPT, *kept) if name in os.environ}
    return dict.fromkeys(ONE_THREAD, "1") | values


def drop_rights(uid: int, gid: int) -> None:
    """Give up all capabilities for good, and become user `uid` and group `gid` unless `uid` is -1.

    On Linux, programs started later get no rights either, the process joins a new session keyring, and
    other processes of the same user can no longer read or change its memory. With a change of user the
    supplementary groups are dropped, and others cannot change its limits: prlimit(2) requires that all
    three group ids are the caller's, and the saved one becomes a group without members. A reward could
    otherwise lower the memory limit of a built-in reward, and so change its scores. Elsewhere only the
    user changes. Raise OSError if the kernel refuses.
    """
    system = ctypes.CDLL(None, use_errno=True)
    if _LINUX:
        for capability in range(_LAST + 1):  # refused without CAP_SETPCAP; no_new_privs then suffices
            system.prctl(_DROP_BOUNDING, capability, 0, 0, 0)
        _leave_keys(system)
    if uid >= 0:
        os.setgroups([])
        os.setresgid(gid, gid, unused_id(gid))
        os.setresuid(uid, uid, uid)
    if _LINUX:
        system.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        _check(system.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        _check(system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
        hide_memory()


def _leave_keys(system: ctypes.CDLL) -> None:
    """Join a new session keyring of the kernel, so that this process loses the keys of the old one.

    Whoever has a session keyring can read the keys in it, after a change of user too. Nothing is done on
    machines other than x86_64 and aarch64. `system` is the C library, which makes the call. Raise
    OSError if the kernel refuses, but not for ENOSYS, a kernel without keys, or EPERM, a container that
    forbids keyctl(2).
    """
    number = _KEYCTL.get(os.uname().machine)
    failed = number and system.syscall(number, _JOIN_SESSION, None) < 0
    if failed and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        _check(-1, "a new session keyring")


def hide_memory() -> None:
    """On Linux, keep other processes of the same user from reading and changing this one's memory."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)


def _check(result: int, what: str) -> None:
    """Raise OSError unless `result`, of the system call just made, is 0.

    The error has the call's errno, and a text that begins with `what`.
    """
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
