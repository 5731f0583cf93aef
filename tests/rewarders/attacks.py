"""Hostile rewards. Each is called as a user's reward, attacks, and returns its completions' lengths.

An attack that got what it wanted adds 100 for each success. `target` tells it where to look; a real
attacker finds the same by a search. All processes of an attack bear the mark of the test as their name.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import hashlib
import json
import marshal
import math
import mmap
import os
import pickle
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
FORGED = 666.0
_SET_NAME, _SUBREAPER, _SET_DUMPABLE = 15, 36, 4  # of prctl(2)
_ATTACH, _SEIZE = 16, 0x4206  # of ptrace(2)
ADD_KEY, KEYCTL, SESSION, JOIN = 248, 250, -3, 1  # of keyrings(7)
_SEARCH, _READ = 10, 11  # of keyctl(2)
_PIDFD_OPEN, _PIDFD_GETFD, _VM_READ, _CAPSET = 434, 438, 310, 126  # numbers of system calls


def honest(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def sibling(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Is at work until the attack has ended."""
    Path(target[0]["drop"], target[0]["begun"]).touch()
    while not Path(target[0]["drop"], target[0]["ended"]).exists():
        time.sleep(0.01)
    return honest(completions)


def _begin(target: list[dict[str, Any]]) -> dict[str, Any]:
    LIBC.prctl(_SET_NAME, target[0]["mark"].encode(), 0, 0, 0)
    return target[0]


def _family(target: dict[str, Any]) -> list[int]:
    """The rewarder's processes but this one, by the numbers that this process has to use for them."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid for pid in parents if target["rewarder"] in _line(pid, parents)]
    if os.readlink("/proc/self/ns/pid") != target["pid_namespace"]:
        found += range(1, os.getpid() + 20)
    return [pid for pid in dict.fromkeys(found) if pid != os.getpid()]


def _line(pid: int, parents: dict[int, int]) -> list[int]:
    """A process and its ancestors."""
    found = [pid]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


class _Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}; cp /bin/true {self.path}",)


def _framed(body: bytes) -> Iterator[bytes]:
    """A body after each length that a receiver may expect, and alone."""
    for form in (">I", "<I", ">i", ">Q", "<Q"):
        yield struct.pack(form, len(body)) + body
    yield body
    yield body + b"\n"


def _frames(target: dict[str, Any]) -> list[bytes]:
    """Answers as a receiver may expect them, and pickles."""
    scores = {"values": [FORGED] * 2, "extra": {}, "metrics": {}}
    bodies = [
        json.dumps({"value": scores}).encode(),
        pickle.dumps(_Trap(target["trap"])),
        pickle.dumps((True, _Trap(target["trap"]))),
        marshal.dumps([FORGED] * 2),
        *(
            json.dumps(body).encode()
            for body in (
                scores,
                list(scores.values()),
                [FORGED] * 2,
                {"scores": scores},
                {"result": scores},
                {"value": scores},
                {"value": list(scores.values())},
                {"value": [FORGED] * 2},
                {"value": None},
                {"mistake": ""},
                {"ended": 0},
                {"ended": "0", "ready": "", "prepared": True, "failed": "", "refused": ""},
                {"clean": True, "status": 0},
                "end",
            )
        ),
    ]
    return [frame for body in bodies for frame in _framed(body)]


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]


def _write(descriptor: int, frames: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, False)
        for frame in frames:
            os.write(descriptor, frame)


def pickles(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    for descriptor in _open_descriptors():
        _write(descriptor, [frame for frame in _frames(own) if b"touch" in frame])
    return honest(completions)


def frames(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    for descriptor in _open_descriptors():
        for frame in _frames(own):
            if b"touch" not in frame:
                _write(descriptor, [frame])
    os._exit(0)


def _scores(**changes: Any) -> dict[str, Any]:
    return {"value": {"values": [1.0, 3.0], "extra": {}, "metrics": {}} | changes}


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


WRONG_ANSWERS = tuple(
    body if isinstance(body, bytes) else json.dumps(body).encode()
    for body in (
        _scores(values=[1.0]),
        _scores(values=[1.0] * 3),
        _scores(values={"0": 1.0, "1": 3.0}),
        _scores(values="ab"),
        _scores(values=["1.0", 3.0]),
        _scores(values=[True, 3.0]),
        _scores(values=[[1.0], 3.0]),
        _scores(values=[10**400, 3.0]),
        _scores(values=[-(10**4000), 3.0]),
        _scores(values=[1e10, 3.0]),
        _scores(values=[math.nan, 3.0]),
        _scores(values=[math.inf, 3.0]),
        b'{"value": {"values": [1e999, 3.0], "extra": {}, "metrics": {}}}',
        b'{"value": {"values": [1.0, 3.0], "extra": {}, "metrics": {"a": 1e999}}}',
        b'{"value": {"values": [1.0, 3.0], "extra": {"a": [1e999, 1]}, "metrics": {}}}',
        b'{"value": ' + _nested(100_000).encode() + b"}",
        b'{"value": {"values": ' + _nested(100_000).encode() + b', "extra": {}, "metrics": {}}}',
        _scores(extra={"a": [json.loads(_nested(900)), 1]}),
        b'{"value": {"values": [1' + b"0" * 100_000 + b', 3.0], "extra": {}, "metrics": {}}}',
        _scores(extra={"a": [1]}),
        _scores(extra={"a": "ab"}),
        _scores(extra=[["a", [1, 2]]]),
        _scores(extra={"n" * 300: [1, 2]}),
        _scores(extra={"a": ["x" * 1_100_000, 1]}),
        _scores(extra={"a": [10**30, 1]}),
        _scores(extra={str(number): [1, 2] for number in range(2000)}),
        _scores(metrics={"a": "1"}),
        _scores(metrics={"a": True}),
        _scores(metrics={"a": None}),
        _scores(metrics={"a": 10**400}),
        _scores(metrics={"a": 1e31}),
        _scores(metrics={str(number): 1 for number in range(2000)}),
        _scores(metrics=[1]),
        _scores(more=1),
        {"value": {"values": [1.0, 3.0]}},
        {"value": [1.0, 3.0]},
        {"value": None},
        {"value": 1, "mistake": ""},
        {"mistake": None},
        {"mistake": "\x1b[2J" * 20_000},
        {"mistake": {"a": 1}},
        {"ended": 0},
        {},
        [],
        b"",
        b"null",
        b"{",
        b"\xff",
        b'"\\ud800"',
    )
)
"""Bodies of frames; none of them are scores of two completions."""


def wrong_answers(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Sends one of these, in the form in which an answer is sent."""
    body = WRONG_ANSWERS[_begin(target)["variant"]]
    for descriptor in _open_descriptors():
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, True)
            os.write(descriptor, struct.pack(">I", len(body)) + body)
    os._exit(0)


def frames_to_others(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """By /proc/PID/fd and by pidfd_getfd, which takes a copy of another process's descriptor."""
    own = _begin(target)
    wrote = 0
    for pid in _family(own):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    descriptor = os.open(f"/proc/{pid}/fd/{name}", os.O_WRONLY | os.O_NONBLOCK)
                    _write(descriptor, _frames(own))
                    wrote += 1
        pidfd = LIBC.syscall(_PIDFD_OPEN, pid, 0)
        for number in range(64):
            if pidfd >= 0 and (copy := LIBC.syscall(_PIDFD_GETFD, pidfd, number, 0)) >= 0:
                _write(copy, _frames(own))
                wrote += 1
    return [value + 100 * wrote for value in honest(completions)]


def half_a_frame(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    for descriptor in _open_descriptors():
        _write(descriptor, [struct.pack(">I", 1000) + b'{"values": [666.0'])
    os._exit(0)


def huge_frame(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Announces 2 GiB and sends for as long as somebody takes it."""
    _begin(target)
    block = bytes(1 << 20)
    for descriptor in _open_descriptors():
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, True)
            os.write(descriptor, struct.pack(">I", 2**31 - 1))
            for _ in range(1024):
                os.write(descriptor, block)
    return honest(completions)


def huge_answer(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    return [1.0] * 3_000_000


def close_everything(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    os.closerange(0, 65536)
    return honest(completions)


def shut_down_sockets(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    for descriptor in _open_descriptors():
        LIBC.shutdown(descriptor, 2)
    return honest(completions)


def pass_descriptors(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Sends descriptors that a receiver keeps open without knowing."""
    _begin(target)
    copies = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 200)
    for descriptor in _open_descriptors():
        with contextlib.suppress(OSError):
            peer = socket.socket(fileno=os.dup(descriptor))
            peer.setblocking(False)
            for _ in range(5):
                peer.sendmsg([b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, copies)])
    return honest(completions)


def flags_of_descriptors(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """What is open in the rewarder too would be truncated, moved, and made not to block."""
    _begin(target)
    for descriptor in [*_open_descriptors(), 0, 1, 2]:
        for change in (
            lambda number: fcntl.fcntl(number, fcntl.F_SETFL, os.O_NONBLOCK),
            lambda number: os.lseek(number, 0, os.SEEK_SET),
            lambda number: os.ftruncate(number, 0),
        ):
            with contextlib.suppress(OSError):
                change(descriptor)
    return honest(completions)


def inherited_descriptors(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Leaks descriptors for the next call, and counts files of others that it was given."""
    own = _begin(target)
    kept = globals().setdefault("_LEAKED", [])
    found = len(kept)
    kept += [os.open("/dev/null", os.O_RDWR) for _ in range(100)]
    for descriptor in _open_descriptors():
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(own["folder"])
    return [value + 100 * found for value in honest(completions)]


def patched_globals(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Each of these is asked about a score somewhere."""
    _begin(target)
    forged: Callable[..., Any] = lambda *_, **__: FORGED  # noqa: E731
    builtins.float = forged  # type: ignore[assignment, misc]
    builtins.len = lambda _: 2  # type: ignore[assignment]
    math.isfinite = lambda _: True
    json.loads = lambda *_, **__: [FORGED] * 2  # type: ignore[assignment]
    json.dumps = lambda *_, **__: "[666.0, 666.0]"  # type: ignore[assignment]
    for name, module in list(sys.modules.items()):
        if name.startswith("penstock."):
            for key, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type):
                    setattr(module, key, lambda *_, **__: [FORGED] * 2)
    globals()["honest"] = lambda _: [FORGED] * 2
    return [FORGED] * 2


def thread_left_behind(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Writes answers of its own to whatever is open, for the calls that come."""
    own = _begin(target)

    def run() -> None:
        while True:
            for descriptor in _open_descriptors():
                _write(descriptor, _frames(own))

    threading.Timer(0.0005, run).start()
    return honest(completions)


def at_exit(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)

    def last() -> None:
        for descriptor in _open_descriptors():
            _write(descriptor, _frames(own))
        time.sleep(3600)

    atexit.register(last)
    return honest(completions)


def _fork(work: Callable[[], None]) -> None:
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)


def _sleep_on(own: dict[str, Any]) -> NoReturn:
    """Wait for the end, and write to what is still open meanwhile."""
    LIBC.prctl(_SET_NAME, f"{own['mark']}d".encode(), 0, 0, 0)
    for number in range(1, 32):
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        for descriptor in _open_descriptors():
            _write(descriptor, _frames(own))
        time.sleep(0.05)


def daemon(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """A subreaper whose grandchildren have sessions of their own, and keep the answer's descriptor."""
    own = _begin(target)

    def first() -> None:
        LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        _fork(second)
        _sleep_on(own)

    def second() -> None:
        os.setsid()
        _fork(lambda: _sleep_on(own))

    _fork(first)
    return honest(completions)


def running_daemon(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Forks on and on: nobody sees the same process twice."""
    _begin(target)

    def hop() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
            time.sleep(0.001)

    _fork(hop)
    return honest(completions)


def stray_program(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Another program, without the attacker's memory, with nobody's file open."""
    own = _begin(target)
    program = Path(own["drop"], own["mark"])  # a program's name is that of its file
    program.symlink_to("/bin/sleep")
    subprocess.Popen([program, "60"], start_new_session=True)
    return honest(completions)


def shared_memory_files(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    for number in range(4):
        with contextlib.suppress(OSError), open(f"/dev/shm/{own['mark']}-{number}", "wb") as file:
            for _ in range(8):
                file.write(bytes(1 << 20))
    return honest(completions)


def system_v(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    LIBC.shmget(own["key"], 1 << 20, 0o1666)
    LIBC.semget(own["key"], 4, 0o1666)
    LIBC.msgget(own["key"], 0o1666)
    return honest(completions)


def flood(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """30 MB of lines, with control characters, on both outputs."""
    _begin(target)
    line = b"\x1b[2J\x1b]0;owned\x07 flood " * 40 + b"\n"
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            for _ in range(15_000):
                os.write(descriptor, line)
    return honest(completions)


def trace(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    caught = 0
    for pid in _family(own):
        for request in (_SEIZE, _ATTACH):
            if LIBC.ptrace(request, pid, 0, 0) == 0:
                caught += 1
                LIBC.ptrace(17, pid, 0, 0)  # detach
    return [value + 100 * caught for value in honest(completions)]


def memory_of_others(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    reached = 0
    buffer = ctypes.create_string_buffer(8)
    for pid in _family(own):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "r+b"):
            reached += 1
        address = ctypes.addressof(buffer)
        piece = (ctypes.c_uint64 * 2)(address, 8)
        reached += LIBC.syscall(_VM_READ, pid, piece, 1, piece, 1, 0) > 0
    return [value + 100 * reached for value in honest(completions)]


def kill_others(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _signal_all(_begin(target), signal.SIGKILL)
    return honest(completions)


def stop_others(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _signal_all(_begin(target), signal.SIGSTOP)
    return honest(completions)


def _signal_all(own: dict[str, Any], number: int) -> None:
    for pid in _family(own):
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    if os.readlink("/proc/self/ns/pid") != own["pid_namespace"]:
        with contextlib.suppress(OSError):
            os.kill(-1, number)


def kill_own_group(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    os.killpg(0, signal.SIGKILL)
    return honest(completions)


def stop_itself(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    os.kill(os.getpid(), signal.SIGSTOP)
    return honest(completions)


def limit_others(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    for pid in _family(own):
        for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(pid, kind, (0, 0))
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, {0})
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)
    return honest(completions)


def _readable(path: str) -> bool:
    try:
        return bool(Path(path).read_bytes())
    except OSError:
        return False


def read_queue_url(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    found = _readable(_begin(target)["url"])
    return [value + 100 * found for value in honest(completions)]


def read_shadow(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    found = _readable("/etc/shadow")
    return [value + 100 * found for value in honest(completions)]


def read_private_folder(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    found = _readable(own["token"])
    with contextlib.suppress(OSError):
        Path(own["private"], "planted").touch()
        found += 1
    return [value + 100 * found for value in honest(completions)]


def read_others_environment(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Also by way of the roots and working folders of other processes."""
    own = _begin(target)
    found = 0
    for pid in _family(own):
        with contextlib.suppress(OSError):
            found += own["half"].encode() in Path(f"/proc/{pid}/environ").read_bytes()
        found += _readable(f"/proc/{pid}/cwd/queue/url") + _readable(f"/proc/{pid}/root/etc/shadow")
    return [value + 100 * found for value in honest(completions)]


def read_own_environment(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Search the variables, and this process's memory: only a secret's beginning and hash are known."""
    own = _begin(target)
    LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    found = sum(value.startswith(own["half"]) for value in os.environ.values())
    found += own["half"].encode() in Path("/proc/self/environ").read_bytes()
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line.split()[1] and end - begin <= 64 << 20:
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(begin)
                    found += _secrets_in(memory.read(end - begin), own)
    return [value + 100 * found for value in honest(completions)]


def _secrets_in(data: bytes, own: dict[str, Any]) -> int:
    places = re.finditer(re.escape(own["half"].encode()), data)
    texts = (data[place.start() : place.start() + own["length"]] for place in places)
    return sum(hashlib.sha256(text).hexdigest() == own["digest"] for text in texts)


def read_keys(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Reads a key that the rewarder's user has in the keyring of the session."""
    own = _begin(target)
    key = LIBC.syscall(KEYCTL, _SEARCH, SESSION, b"user", own["mark"].encode(), 0)
    found = key > 0 and LIBC.syscall(KEYCTL, _READ, key, ctypes.create_string_buffer(99), 99) > 0
    return [value + 100 * found for value in honest(completions)]


def regain_rights(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Rights that are left count too: capabilities, groups, and what a program could add."""
    own = _begin(target)
    gained = 0
    header, all_bits = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6)
    gained += LIBC.syscall(_CAPSET, header, all_bits) == 0
    for ids in ((0, 0, 0), (-1, 0, -1), (-1, -1, 0)):
        with contextlib.suppress(OSError):
            os.setresgid(*ids)
            gained += 1
        with contextlib.suppress(OSError):
            os.setresuid(*ids)
            gained += 1
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    gained += sum(int(status[name], 16) != 0 for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
    gained += status["NoNewPrivs"] != "1"
    gained += 0 in os.getresuid() + os.getresgid() or 0 in os.getgroups()
    if own["owner"] == 0:
        gained += os.getuid() == 0
    return [value + 100 * gained for value in honest(completions)]


def suid_program(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """The copy of `id` belongs to root and has the suid bit."""
    own = _begin(target)
    said = subprocess.run([own["suid"], "-u"], capture_output=True, text=True, check=False).stdout
    return [value + 100 * (said.strip() == "0") for value in honest(completions)]


def fork_bomb(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    with contextlib.suppress(OSError):
        for _ in range(100):
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
    return honest(completions)


def memory(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """8 GiB, by two ways; and goes on as if nothing had been."""
    _begin(target)
    got = 0
    with contextlib.suppress(MemoryError, OSError):
        got += bool(bytearray(8 << 30))
    with contextlib.suppress(MemoryError, OSError):
        got += len(mmap.mmap(-1, 8 << 30)) > 0
    return [value + 100 * got for value in honest(completions)]


def large_file(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    own = _begin(target)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with contextlib.suppress(OSError), open(Path(own["drop"], "large"), "wb") as file:
        file.truncate(8 << 30)
    return honest(completions)


def deep_column(completions: list[str], target: list[dict[str, Any]], log_extra: Any) -> list[float]:
    _begin(target)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with contextlib.suppress(RecursionError, ValueError):
        log_extra("deep", [deep] * 2)
    shallow: list[Any] = []
    for _ in range(400):
        shallow = [shallow]
    log_extra("shallow", [shallow] * 2)
    return honest(completions)


def many_columns(completions: list[str], target: list[dict[str, Any]], log_extra: Any) -> list[float]:
    _begin(target)
    for number in range(1_000_000):
        log_extra(f"column {number}", [1, 2])
    return honest(completions)


def huge_columns(
    completions: list[str], target: list[dict[str, Any]], log_extra: Any, log_metric: Any
) -> list[float]:
    """Each below the limit of one column, far above it together; past the checks of this process."""
    _begin(target)
    log = log_extra.__self__
    for number in range(200):
        log.extra[f"large {number}"] = ("x" * 500_000, "y")
        log.metrics["m" * 100_000 + str(number)] = 1e308
    return honest(completions)


def wrong_columns(
    completions: list[str], target: list[dict[str, Any]], log_extra: Any, log_metric: Any
) -> list[float]:
    """What no check of this process lets through, put behind the checks."""
    _begin(target)
    log = log_extra.__self__
    log.extra["wrong count"] = (1,)
    log.extra["text"] = "ab"
    log.metrics["not finite"] = math.inf
    log.metrics["a text"] = "1.0"
    return honest(completions)


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)

    __repr__ = __str__


def mute_exception(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    raise _Unspeakable


def huge_exception(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    raise type("E" * 10_000_000, (Exception,), {})("\x1b[2J" + "m" * 50_000_000)


class _Numb(float):
    """A float whose conversion replaces what converts the next one."""

    def __float__(self) -> float:
        builtins.float = lambda _: FORGED  # type: ignore[assignment, misc]
        json.dumps = lambda *_, **__: "[666.0, 666.0]"  # type: ignore[assignment]
        return FORGED

    def item(self) -> float:
        return self.__float__()


def side_effects(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    return [_Numb(value) for value in honest(completions)]


class _Liar(list[float]):
    """A list of as many values as somebody asks."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[float]:
        yield from (math.nan for _ in range(10_000))


def lying_list(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    _begin(target)
    return _Liar([math.nan, 10.0**300])


def abstract_socket(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """A daemon waits at an abstract address that a later call of the same reward asks for its score."""
    own = _begin(target)
    address = "\0" + own["mark"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(0.2)
        client.connect(address)
        return [FORGED] * 2
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    _fork(lambda: _fork(lambda: _sleep_on(own)))
    return honest(completions)


def queue_socket(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Connects to a socket in a private folder: by its path, and by the roots of other processes."""
    own = _begin(target)
    reached = 0
    roots = ["", *(f"/proc/{pid}/root" for pid in _family(own))]
    for root in roots:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(root + own["socket"])
            reached += 1
    return [value + 100 * reached for value in honest(completions)]


def change_code(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Writes to the source of this reward, and beside it, where the next process finds it."""
    own = _begin(target)
    changed = 0
    for name in (__file__, str(Path(__file__).parent / "json.py"), own["library"]):
        with contextlib.suppress(OSError), open(name, "ab"):
            changed += 1
    return [value + 100 * changed for value in honest(completions)]


def hang(completions: list[str], target: list[dict[str, Any]]) -> list[float]:
    """Ignores every signal that can be ignored."""
    _begin(target)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(3600)
