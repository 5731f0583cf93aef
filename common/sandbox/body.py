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
import sysconfig
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.common.own_code import KEPT
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
    leave_room,
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
_LINE, _PLACE = 60, 300
"""Letters of a line of code that an error shows, and of the place with all its lines."""
_PACKAGES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
_LIBRARIES = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")), *_PACKAGES)
_FORK_S = 2.0
"""Time for a user's other processes to end, when the kernel allows no more of them."""


def run_body(control: socket.socket, output: int, asked: dict[str, Any], isolated: bool) -> NoReturn:
    """Be a sandbox process: give up all rights, import the code that `asked` names, and serve calls.

    Descriptors 3 to 255 except `control`, the connection to the pool, and `output`, which becomes stdout
    and stderr, are closed. `asked` has `limits` (the fields of Limits), `code` (pairs of source, digest;
    [] for built-in code), `load` (the function that imports a code), `user` and `setting` (the user's
    name and its setting, for errors). `isolated` says whether the process has namespaces of its own.

    Frames sent on `control`: `refused` with the reason if this machine does not allow limits or rights;
    `prepared` before any foreign code has run; `failed` with the reason if the code cannot be imported;
    `ready`, with the reason if calls cannot be forked; `begun` and `ended` for each call, `ended` with
    its exit status. Exit with 0 when `control` closes, with 1 after `refused` or `failed`, with
    OUT_OF_MEMORY if the memory is used up.
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
    with contextlib.suppress(ConnectionError):  # the pool is gone
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
    os._exit(0)


def _prepare(limits: Limits, asked: dict[str, Any], isolated: bool) -> None:
    """Set `limits`, read the sources in `asked["code"]`, become user `limits.uid`, give up all rights.

    The process begins a session, ignores SIGTERM, SIGINT and SIGHUP, has a /proc of its own if
    `isolated`, and dies with its parent. Installed packages that the sources import are imported before
    the rights are given up. A working directory that the user cannot enter becomes "/". `asked["user"]`
    is the user's name, for errors. Raise MemoryError if over a quarter of the memory limit was used
    already, OSError if the kernel refuses a limit or right.
    """
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
    """Call the function that `asked["load"]` names with each (source, digest) in `asked["code"]`.

    If a call raises an exception, or this process has refused an import, send the frame `failed` with
    the reason on `control`, and exit with 1. On MemoryError exit with OUT_OF_MEMORY.
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
    """Import the module in `name`, "package.module:function", and return the function.

    Raise ImportError if there is no such module, AttributeError if the module has no such function, and
    what the module's own code raises.
    """
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
    """Return why this process cannot be forked for each call; "" if it can.

    The first of these reasons counts: other threads ("2 threads"; none are found without /proc), open
    descriptors below 256 that are not in `files_before` ("1 open files"), and child processes, ended
    ones too until they are collected ("processes").
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
    """Serve one call after the other, until the pool closes `control`; then exit with 0.

    A call comes as two descriptors: its connection and its output. Send the frame `begun` when it
    begins, `ended` with its exit status afterwards. Each call is forked, unless `forks_for` is empty:
    then it runs in this process, with status 0, and stdout and stderr lead to the descriptor `output`
    again afterwards. `forks_for`, the setting with the sandbox's user such as REWARDER_USER, is for
    errors. `limits` are those of this process. Between calls, ended orphans of calls are collected
    every 20 ms.
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
    """Collect all ended children, which orphans are too; return True if any child still runs.

    An ended process counts in the limit of the user's processes until it is collected.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _fork_call(control: socket.socket, numbers: list[int], limits: Limits, setting: str) -> int:
    """Serve a call in a new process, send `begun` on `control`, and wait for the process's end.

    Return the process's exit status, -9 if signal 9 ended it. `numbers` are the descriptors of the
    call's connection and output, which this process closes. `limits` are those of the new process. If
    the kernel refuses a fork for 2 s, the call's connection gets the frame `mistake`, which names
    `setting`, the setting of the sandbox's user such as REWARDER_USER; `begun` is sent and the result is
    0 also then. The pool limits the wait: it kills the process.
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
    """Fork; return 0 in the new process, and the new process's id in this one.

    If the kernel refuses, collect ended children and try again every 20 ms; raise OSError after 2 s.
    """
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
    """Read a request, call its function, and send a frame with the `value` or `mistake`.

    `numbers` are the descriptors of the call's connection and output; stdout and stderr lead to the
    output then. After a request whose key `more` is true, the next one is read. Return after a request
    without it, or when the pool has closed the connection; this end is closed then. If the process has
    ever used over a quarter of `limits.memory_bytes`, exit with OUT_OF_MEMORY, 77, and send nothing. A
    process that the called code has forked exits with 0 without sending. Timers of the code are stopped.
    """
    leave_room(limits)
    connection = socket.socket(fileno=numbers[0])
    for number in (1, 2):
        os.dup2(numbers[1], number)
    os.close(numbers[1])
    own, more = os.getpid(), True
    with connection, contextlib.suppress(EOFError, ConnectionError):  # the pool has closed it
        while more:
            request = frames.receive_request(connection)
            more = request.get("more", False)
            frame = _outcome(request)
            if os.getpid() != own:
                os._exit(0)  # the code forked: only the process itself may send the result
            clear_timers()
            with contextlib.suppress(Exception):  # the code may have put anything in their place
                sys.stdout.flush()
                sys.stderr.flush()
            if came_near(limits.memory_bytes):
                os._exit(OUT_OF_MEMORY)
            connection.sendall(frame)


def _outcome(request: dict[str, Any]) -> bytes:
    """Call the function named `request["work"]` with `request["arguments"]`; return a packed frame.

    The frame has the function's `value`, or a `mistake`: the text of its exception, or that the value is
    no JSON or over 4 MiB. Once this process has refused an import, each frame has the first refusal as
    its mistake. On MemoryError exit with OUT_OF_MEMORY.
    """
    try:
        value = find_function(request["work"])(*request["arguments"])
        frame = frames.pack({"value": value})
        if len(frame) > frames.LONGEST_ANSWER:
            most = f"expected at most {frames.LONGEST_ANSWER}: let your function return less"
            raise ValueError(f"the code returned {len(frame)} bytes, {most}")
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException as error:  # the code is not ours and may raise anything, SystemExit too
        frame = frames.pack({"mistake": _text_of(error)})
    refused = late_imports.refusal()
    return frames.pack({"mistake": refused}) if refused else frame


def _text_of(error: BaseException) -> str:
    """Return "TYPE: TEXT (PLACE)" of `error`, without commands for terminals, of at most 500 characters.

    PLACE is where in the user's code it was raised, see `_place_of`. The TEXT of a PermissionError
    about a file ends with this process's user id and the remedy. If the exception has no text because
    its own methods fail, TEXT is "an exception without a text". A hidden variable has a remedy too.
    """
    try:
        text = str(error)
        if type(error) is PermissionError and error.filename is not None:
            text += f" (user id {os.getuid()}: {_READABLE})"
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if type(error) is KeyError and type(os.environ).__getitem__.__code__ in codes:
            text += " (hidden by the sandbox: set REWARDER_ENVIRONMENT or ACTOR_EPISODE_ENVIRONMENT)"
    except BaseException:  # the exception is of foreign code, its methods too
        text = "an exception without a text"
    place = short(_place_of(error))[: _PLACE + 3]  # escaped before the cut, or the place would be lost
    return short(f"{type(error).__name__}: {text}")[: frames.LONGEST_MISTAKE - len(place)] + place


def _place_of(error: BaseException) -> str:
    """Return the innermost two calls in the user's files that lead to `error`; "" if none does.

    Example: " (own.py, line 3, in score: `return read(text)`; own.py, line 9, in read: `int(text)`)".
    The lines are those of the sources that were read before the code ran.
    """
    try:
        frames_of = traceback.walk_tb(error.__traceback__)
        calls = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames_of]
        kept = [call for call in calls if call[0] in KEPT]
        own = [call for call in kept if not call[0].startswith(_LIBRARIES)]
        own = own or [call for call in kept if call[0].startswith(_PACKAGES)]  # the user's, installed
        shown = "; ".join(
            f"{os.path.basename(path)}, line {line}, in {name}: `{_line_of(path, line)}`"
            for path, line, name in own[-2:]
        )
    except BaseException:  # the exception is of foreign code, its traceback too
        return ""
    return f" ({shown[:_PLACE]})" if shown else ""


def _line_of(path: str, number: int) -> str:
    """Return the begin of a line, counted from 1, of a source that was read beforehand."""
    return KEPT[path].split(b"\n")[number - 1].decode(errors="replace").strip()[:_LINE]
