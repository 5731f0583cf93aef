"""What runs foreign code: a process without rights, below its keeper, that serves calls of the pool.

The process for a user's code imports that code once and forks for every call, so that no call sees what
another one left. Code that cannot be forked (threads, open files or processes since its import) and the
built-in code are called in the process itself.

Waits for: the two descriptors of a call, for its frames and for its output. Ends when: the pool or the
keeper ends it.
"""

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.common.sandbox import frames, late_imports
from penstock.common.sandbox.frames import short
from penstock.common.sandbox.isolation import hide_processes
from penstock.common.sandbox.limits import (
    OUT_OF_MEMORY,
    Limits,
    came_near,
    clear_timers,
    die_with_parent,
    ignore_polite_signals,
    let_children_obey,
    set_limits,
)
from penstock.common.sandbox.user import drop_rights

CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MOST_FILES = 256
"""Descriptors that are searched for open files."""

_READABLE = "copy the file to where this user can read it, or give it more rights (chmod)"
_COLLECT_S = 0.02
"""Time between two looks for ended processes."""
_FORK_S = 2.0
"""Time for a user's other processes to end, when the kernel allows no more of them."""


def run_body(control: socket.socket, output: int, asked: dict[str, Any], isolated: bool) -> NoReturn:
    """Give up all rights, import the code that `asked` names, and serve calls until `control` closes.

    Frames on `control`: `refused` if this machine does not allow the settings; `prepared` before any
    foreign code has run; `failed` with the reason if the code cannot be imported; `ready`, with the
    reason if the code cannot be forked; `begun` and `ended` for each call, `ended` with its
    exit status.
    """
    os.dup2(output, 1)
    os.dup2(output, 2)
    kept = max(control.fileno(), output)
    for number in range(3, kept):
        if number not in (control.fileno(), output):
            with contextlib.suppress(OSError):
                os.close(number)
    os.closerange(kept + 1, _MOST_FILES)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", 1, errors="backslashreplace", closefd=False) for number in (1, 2)
    )
    limits = Limits(**asked["limits"])
    try:
        _prepare(limits, asked, isolated)
    except BaseException as error:  # whatever the reason is, the pool has to name it
        frames.send(control, {"refused": _text_of(error)})
        os._exit(1)
    frames.send(control, {"prepared": True, "isolated": isolated})
    files = _open_files()
    if asked["code"]:
        _import_code(control, asked)
    if came_near(limits.memory_bytes):
        os._exit(OUT_OF_MEMORY)
    reason = _why_not_forked(files) if asked["code"] else "built-in"
    frames.send(control, {"ready": reason})
    gc.collect()
    gc.freeze()
    _serve(control, output, limits, asked["setting"] if not reason else "")


def _prepare(limits: Limits, asked: dict[str, Any], isolated: bool) -> None:
    """Set limits, read the user's source, and give up all rights. Raise OSError or MemoryError."""
    if came_near(limits.memory_bytes):
        raise MemoryError
    os.setsid()  # a signal to the process group reaches no other process
    ignore_polite_signals()
    let_children_obey()
    set_limits(limits)
    if isolated:
        hide_processes()
    late_imports.read_beforehand([source for source, _ in asked["code"]], asked["user"])
    folder = os.getcwd()
    drop_rights(limits.uid, limits.gid)
    try:
        os.chdir(folder)
    except OSError:  # inside of it, the folders around it would not be checked any more
        os.chdir("/")
    die_with_parent()


def _import_code(control: socket.socket, asked: dict[str, Any]) -> None:
    """Import each code in `asked["code"]` with the function `asked["load"]`.

    If that raises an exception or an import was refused, send the frame `failed` on `control` with the
    reason, and exit with 1. Without memory exit with OUT_OF_MEMORY.
    """
    try:
        for source, digest in asked["code"]:
            find_function(asked["load"])(source, digest)
        failure = late_imports.refusal()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # the code is not ours and may raise anything, SystemExit too
        failure = late_imports.refusal() or _text_of(error)
    if failure:
        frames.send(control, {"failed": failure})
        os._exit(1)


def find_function(name: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names. Raise ImportError or AttributeError."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _open_files() -> set[int]:
    """Return the open descriptors of this process below 256."""
    return {number for number in range(_MOST_FILES) if _is_open(number)}


def _is_open(number: int) -> bool:
    """Return whether the descriptor `number` is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _why_not_forked(files_before: set[int]) -> str:
    """Return what the imported code has started that a fork would break or share.

    Examples: "2 threads", "1 open files" (open now, but not in `files_before`), "processes". The result
    is "" if there is nothing.
    """
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    if threads > 1:
        return f"{threads - 1} threads"
    if extra := len(_open_files() - files_before):
        return f"{extra} open files"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return "processes"
    return ""


def _serve(control: socket.socket, output: int, limits: Limits, forks_for: str) -> NoReturn:
    """Serve one call after the other, until `control` closes; then exit with 0.

    Each call is forked unless `forks_for` is empty. An error names `forks_for`, the setting of the
    sandbox's user. After a call that is not forked, stdout and stderr lead to `output` again.
    """
    if forks_for:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else a call's exit status would be lost
    while True:
        while forks_for and _collect() and not select.select([control], [], [], _COLLECT_S)[0]:
            pass
        _, numbers, _, _ = socket.recv_fds(control, 1, 2, CLOSE_ON_EXEC)
        if len(numbers) != 2:
            os._exit(0)
        if forks_for:
            status = _fork_call(control, numbers, limits, forks_for)
        else:
            frames.send(control, {"begun": True})
            _call(numbers, limits)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = 0
        frames.send(control, {"ended": status})


def _collect() -> bool:
    """Collect the ended orphans of this namespace; return whether others live.

    Until then each of them counts in the limit of the user's processes.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _fork_call(control: socket.socket, numbers: list[int], limits: Limits, setting: str) -> int:
    """Serve a call in a new process, send `begun` on `control`, and return the process's exit status.

    `numbers` are the descriptors of the call's connection and output, which are closed here. If the fork
    is refused, the call gets a `mistake` that names `setting`, and the result is 0.
    """
    try:
        pid = _fork()
    except OSError as error:
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        text = (
            f"a process for this call cannot be started: {error}. Its user may run {most} "
            f"processes and threads on this machine: end others, or set {setting} to a user of its own"
        )
        with contextlib.suppress(OSError), socket.socket(fileno=numbers[0]) as connection:
            connection.sendall(frames.pack({"mistake": text}))
        os.close(numbers[1])
        frames.send(control, {"begun": True})
        return 0
    if pid == 0:
        ignore_polite_signals()  # the call; its own children obey them
        os.setsid()
        die_with_parent()
        control.close()
        _call(numbers, limits)
        os._exit(0)
    for number in numbers:
        os.close(number)
    frames.send(control, {"begun": True})
    while True:  # orphans of this namespace are children of this process too
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _fork() -> int:
    """Return the result of os.fork. If the kernel refuses, try again for 2 s; then raise OSError."""
    end = time.monotonic() + _FORK_S
    while True:
        try:
            return os.fork()
        except OSError:
            if time.monotonic() > end:
                raise
        _collect()
        time.sleep(_COLLECT_S)


def _call(numbers: list[int], limits: Limits) -> None:
    """Read a request, call its function, and send `value` or `mistake`; after `more` read another one.

    `numbers` are the descriptors of the call's connection and output. A session ends when the pool
    closes the connection. If the process met its memory limit, or a quarter of it, the process exits
    with OUT_OF_MEMORY. A process that the called code has forked exits without sending.
    """
    connection = socket.socket(fileno=numbers[0])
    for number in (1, 2):
        os.dup2(numbers[1], number)
    os.close(numbers[1])
    own, more = os.getpid(), True
    while more:
        try:
            request = frames.receive_request(connection)
        except (EOFError, ConnectionError):
            break
        more = request.get("more", False)
        frame = _outcome(request)
        if os.getpid() != own:
            os._exit(0)  # the code forked: only the process itself may send the result
        clear_timers()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if came_near(limits.memory_bytes):
            os._exit(OUT_OF_MEMORY)
        connection.sendall(frame)
    connection.close()


def _outcome(request: dict[str, Any]) -> bytes:
    """Call the function `request["work"]`; return a packed frame with its `value`, or with a `mistake`.

    A mistake is the text of an exception, or the first import that was refused, also if there is a
    value. A frame over LONGEST_ANSWER gives a mistake too. On MemoryError exit with OUT_OF_MEMORY.
    """
    try:
        value = find_function(request["work"])(*request["arguments"])
        frame = frames.pack({"value": value})
        if len(frame) > frames.LONGEST_ANSWER:
            raise ValueError(
                f"the code returned {len(frame)} bytes, expected at most {frames.LONGEST_ANSWER}"
            )
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # the code is not ours and may raise anything, SystemExit too
        frame = frames.pack({"mistake": _text_of(error)})
    refused = late_imports.refusal()
    return frames.pack({"mistake": refused}) if refused else frame


def _text_of(error: BaseException) -> str:
    """Return the type and text of `error`, cut and without commands for terminals.

    A PermissionError about a file also tells the user id and the remedy. The exception's own methods may
    fail; then the text is "an exception without a text".
    """
    try:
        text = str(error)
        if type(error) is PermissionError and error.filename is not None:
            text += f" (user id {os.getuid()}: {_READABLE})"
    except BaseException:  # the exception is of foreign code, its methods too
        text = "an exception without a text"
    return short(f"{type(error).__name__}: {text}")
