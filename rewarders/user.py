"""Who scoring processes are: an unprivileged user where possible, with hardly any environment."""

import ctypes
import os
import pwd
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.guard import MARK

KEPT = (
    "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "OMP_NUM_THREADS", MARK,
)  # fmt: skip
"""Environment variables of the rewarder that scoring processes have too; no password is among them."""

_starting = threading.Lock()

_KEEP_CAPABILITIES = 8  # PR_SET_KEEPCAPS of prctl(2)
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of capset(2)
_READ_SEARCH = 1 << 2  # CAP_DAC_READ_SEARCH


def user_of(name: str) -> tuple[int, int]:
    """Number and group of the user to become; (-1, -1) to stay who we are. Raises ConfigError.

    Only root can become another user.
    """
    if not name or os.geteuid() != 0:
        return -1, -1
    try:
        user = pwd.getpwnam(name)
    except KeyError as error:
        raise ConfigError(
            f"REWARDER_USER: there is no user {name!r} here; name one, or leave it empty to stay root"
        ) from error
    return user.pw_uid, user.pw_gid


def become(uid: int, gid: int) -> None:
    """Become another user for good, who may read what root may and has no other right of root's.

    An interpreter in root's home could not go on importing without that.
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


def start_fork_server(context: Any, kept: Sequence[str]) -> None:
    """Start what scoring processes are forked from, with KEPT and the variables named in `kept`.

    Called again it starts it again if it has died, and does nothing otherwise: multiprocessing would
    start it with all variables.
    """
    context.set_forkserver_preload(["__main__", "penstock.rewarders.sandbox"])
    with _starting:
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update({name: before[name] for name in (*KEPT, *kept) if name in before})
        try:
            forkserver.ensure_running()
        finally:
            os.environ.update(before)
