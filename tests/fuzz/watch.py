"""Limits on what one case may take: seconds and memory."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_EXTRA_MIB = 64
LONGEST_S = 20.0

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK, _NOW = re.compile(rb"VmHWM:\s+(\d+)"), re.compile(rb"VmRSS:\s+(\d+)")


class TooMuch(Exception):
    """A case took too long, or too much memory."""


def _memory_kib() -> tuple[int, int]:
    """Return the most memory since the last reset, and what is used now."""
    text = _STATUS.read_bytes()
    peak, now = _PEAK.search(text), _NOW.search(text)
    return int(peak[1]) if peak else 0, int(now[1]) if now else 0


def _late(*_: object) -> None:
    raise TooMuch(f"no end after {LONGEST_S:g} s")


@contextmanager
def limits() -> Iterator[None]:
    """Raise TooMuch if the block takes over 20 s, or 64 MiB more than there was before."""
    _CLEAR.write_bytes(b"5")
    before = _memory_kib()[1]
    old = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    extra = (_memory_kib()[0] - before) / 1024
    if extra > MOST_EXTRA_MIB:
        raise TooMuch(f"{extra:.0f} MiB more memory")
