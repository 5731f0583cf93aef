"""Functions that the sandbox processes of the tests call, by their names."""

from __future__ import annotations

import os
import time
from typing import Any


def echo(value: Any) -> Any:
    return value


def described(value: Any) -> str:
    return repr(value)


def pid() -> int:
    return os.getpid()


def fail() -> None:
    raise ValueError("math domain error")


def no_json() -> object:
    return {1, 2}


def allocate() -> int:
    return len(bytearray(8 << 30))


def leave(status: int = 1) -> None:
    os._exit(status)


def hang() -> None:
    time.sleep(3600)
