"""The rights of sandbox processes: an unprivileged user where possible, few environment variables."""

import ctypes
import os
import pwd
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from penstock.common.errors import ConfigError
from penstock.common.guard import MARK

KEPT = (
    "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "OMP_NUM_THREADS", MARK,
)  # fmt: skip
"""Environment variables that sandbox processes always inherit. None of them holds a password."""

_starting = threading.Lock()
_KEEP_CAPABILITIES = 8  # PR_SET_KEEPCAPS of prctl(2)
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of capset(2)
_READ_SEARCH = 1 << 2  # CAP_DAC_READ_SEARCH


def user_of(name: str, variable: str) -> tuple[int, int]:
    """Return the uid and gid that sandbox processes get; (-1, -1) keeps the present user.

    The present user is kept for an empty `name`, and where this process is not root. Raise ConfigError,
    which names the setting `variable`, if there is no such user.
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
    return user.pw_uid, user.pw_gid


def become(uid: int, gid: int) -> None:
    """Change this process's user for good. Of root's rights only reading all files is kept.

    Without it an interpreter in root's home could import no more. Raise OSError if the kernel refuses.
    """
    system = ctypes.CDLL(None, use_errno=True)
    linux = sys.platform == "linux"
    if linux:
        system.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    if linux:
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        rights = (ctypes.c_uint32 * 6)(_READ_SEARCH, _READ_SEARCH, 0, 0, 0, 0)
        if system.capset(header, rights) != 0:
            raise OSError(ctypes.get_errno(), "capset")


def start_fork_server(context: ForkServerContext, kept: Sequence[str], preload: Sequence[str]) -> None:
    """Start the process from which sandbox processes are forked, unless it is running.

    The fork server imports the modules `preload` and inherits only the variables in KEPT and `kept`. It
    must be started here: multiprocessing would start it with all variables, passwords included.
    Meanwhile this process lacks its other variables.
    """
    context.set_forkserver_preload(["__main__", "penstock.common.sandbox.process", *preload])
    with _starting:
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update({name: before[name] for name in (*KEPT, *kept) if name in before})
        try:
            forkserver.ensure_running()
        finally:
            os.environ.update(before)
