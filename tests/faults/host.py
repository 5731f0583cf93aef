"""A disk that fails on command, and a clock that is wrong: a library between one process and its system.

While the file that FAULTY_DISK names holds the number of an error, such as 5 for EIO, opening, writing,
syncing and renaming in FAULTY_FOLDER fail with it. While the file that FAULTY_CLOCK names exists, the
time is wrong by the seconds in it. Times that only grow (CLOCK_MONOTONIC) are right.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int number_in(const char *name) {
    const char *control = getenv(name);
    char text[16] = {0};
    if (!control) return 0;
    int file = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    return atoi(text);
}

static int within(const char *path) {
    const char *folder = getenv("FAULTY_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int path_fails(const char *path, int writes) {
    int error = within(path) ? number_in("FAULTY_DISK") : 0;
    if (!error || (!writes && (error == ENOSPC || error == EROFS))) return 0;
    errno = error;
    return 1;
}

static int file_fails(int file) {
    char link[64], path[4096];
    int before = errno, error = number_in("FAULTY_DISK");
    if (!error) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) size = 0;
    path[size] = 0;
    if (!within(path)) { errno = before; return 0; }
    errno = error;
    return 1;
}

#define NEXT(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    if (path_fails(path, flags & (O_WRONLY | O_RDWR | O_CREAT))) return -1; \
    return NEXT(name)(path, flags, mode); }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to) { return path_fails(to, 1) ? -1 : NEXT(rename)(from, to); }
int mkdir(const char *path, mode_t mode) {
    return path_fails(path, 1) ? -1 : syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
ssize_t write(int file, const void *data, size_t size) {
    return file_fails(file) ? -1 : syscall(SYS_write, file, data, size);
}
int fsync(int file) { return file_fails(file) ? -1 : syscall(SYS_fsync, file); }
int fdatasync(int file) { return file_fails(file) ? -1 : syscall(SYS_fdatasync, file); }
int clock_gettime(clockid_t id, struct timespec *found) {
    int before = errno, result = syscall(SYS_clock_gettime, id, found);
    if (result == 0 && id == CLOCK_REALTIME) found->tv_sec += number_in("FAULTY_CLOCK");
    if (result == 0) errno = before;
    return result;
}
int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
int ftruncate64(int file, off64_t size) {
    return file_fails(file) ? -1 : syscall(SYS_ftruncate, file, size);
}
"""


def build_faulty_host(folder: Path) -> Path | None:
    """The library, for LD_PRELOAD; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = folder / "faulty_host.c", folder / "faulty_host.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class FaultyHost:
    """Disk and clock of one process: the `variables` that it is to have. `name` is that of its files."""

    def __init__(self, library: Path, name: str, folder: Path) -> None:
        self._disk, self._clock = (library.with_name(f"{name}.{what}") for what in ("disk", "clock"))
        self.variables = {
            "LD_PRELOAD": str(library),
            "FAULTY_FOLDER": str(folder),
            "FAULTY_DISK": str(self._disk),
            "FAULTY_CLOCK": str(self._clock),
        }

    def fail(self, name: str) -> None:
        """Let the disk fail with the error of this name, such as "EIO", until `mend`."""
        _write(self._disk, getattr(errno, name))

    def set_clock(self, seconds: int) -> None:
        """Let the clock be wrong by so many seconds, until `mend`."""
        _write(self._clock, seconds)

    def mend(self) -> None:
        """Be as any host."""
        self._disk.unlink(missing_ok=True)
        self._clock.unlink(missing_ok=True)


def _write(control: Path, number: int) -> None:
    new = control.with_suffix(".new")
    new.write_text(str(number))
    new.rename(control)
