"""A Python interpreter: LEARNER_ENVIRONMENT=interpreter.py:Interpreter. It runs code in a process."""

import contextlib
import io
import os
import signal
import socket
from typing import Any

_LONGEST, _MOST_BYTES = 2000, 2**20
_LIMIT_S = 5.0  # well below LEARNER_TOOL_TIMEOUT_S


class Interpreter:
    """Runs Python. Names stay defined until the conversation or the code's process ends."""

    def reset(self) -> None:
        """Begin without names. The first call starts a process for the code."""
        self._pid = 0

    def run(self, code: str) -> str:
        """Run Python code and return what it prints. Names stay defined.

        Args:
            code: The code. Print what you want to see. It has 5 seconds.

        Returns:
            The printed text, then any error as "Class: text", cut to 2000 characters.
        """
        if not self._pid:
            self._pid, self._channel = _start()
        try:
            self._channel.send(f"{code}\n".encode())
            answer = self._channel.recv(_MOST_BYTES).decode(errors="replace")[:_LONGEST]
            return answer or self._end("ended its process")
        except ConnectionError:
            return self._end("ended its process")
        except TimeoutError:
            return self._end(f"took over {_LIMIT_S:g} s")

    def _end(self, what: str) -> str:
        """Kill the code's process and its group; return an answer that says what the code did."""
        for kill in (os.killpg, os.kill):  # the code may have moved its process to another group
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._channel.close()
        self._pid = 0
        return f"The code {what}: all names are forgotten."


def _start() -> tuple[int, socket.socket]:
    """Fork a process for the model's code; return its id, and a socket for whole codes and answers."""
    channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(_LIMIT_S)
    if not (pid := os.fork()):
        try:
            _serve(other)
        finally:  # whatever the code raises
            os._exit(0)
    other.close()
    os.setpgid(pid, pid)
    return pid, channel


def _serve(channel: socket.socket) -> None:
    """Run the codes that come on `channel` and answer each, until the other end is closed."""
    os.closerange(3, channel.fileno())  # the episode's connection too, which the code could write to
    os.closerange(channel.fileno() + 1, 256)
    own, names = os.getpid(), dict[str, Any]()
    while code := channel.recv(_MOST_BYTES):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, names)
        except BaseException as error:  # of the model's code, such as KeyboardInterrupt
            printed.write(f"{type(error).__name__}: {error}")
        if os.getpid() != own:  # the code has forked
            return
        channel.send((printed.getvalue()[:_LONGEST] or "Nothing was printed.").encode(errors="replace"))
