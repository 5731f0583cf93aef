"""A disk that takes its time: a library that makes each fsync of one process sleep."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = """\
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void take_time(void) {
    struct timespec left = {DELAY_MS / 1000, DELAY_MS % 1000 * 1000000L};
    while (nanosleep(&left, &left) != 0) {}
}

int fsync(int fd) { take_time(); return syscall(SYS_fsync, fd); }
int fdatasync(int fd) { take_time(); return syscall(SYS_fdatasync, fd); }
"""


def build_slow_disk(folder: Path, delay_s: float) -> Path:
    """The library, for LD_PRELOAD; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc or gcc) to build the library that delays fsync")
    source, library = folder / "slow_disk.c", folder / "slow_disk.so"
    source.write_text(_SOURCE)
    delay = f"-DDELAY_MS={round(delay_s * 1000)}"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", delay, "-o", library, source], check=True)
    return library
