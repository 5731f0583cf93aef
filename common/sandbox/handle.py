"""The pool's end of one sandbox process: a keeper's connection, and the calls of the process below it.

Nothing that the process sends is trusted: its frames are checked, and its end is learned from closed
connections and from the keeper. Whatever the process does, at most this handle becomes unusable.
"""

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from penstock.common.sandbox import frames
from penstock.common.sandbox.frames import BrokenFrame, FrameReader
from penstock.common.sandbox.limits import OUT_OF_MEMORY
from penstock.common.sandbox.output import OutputLog
from penstock.common.sandbox.settings import SandboxSettings

_AFTERWARDS_S = 2.0
"""Time for a process to notice that a call has ended. A slower one is replaced, which costs a start."""
_SOON_S = 0.05
"""Time for a call to end by itself after its answer, before it is killed."""
_KEEPER_S = 30.0
"""Time for the keeper to kill what a call left. The keeper itself gives up earlier."""
_PIECE = 2**16
_ABNORMAL = select.POLLERR | select.POLLHUP | select.POLLNVAL


Outcome = dict[str, Any] | str | int | None
"""Of a call: the frame of an answer, a mistake, the exit status of a process, None at the time limit."""


class ProcessGone(Exception):
    """The process had ended before it received a call, so the call may be made in another process."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """The reason why a call has no result."""

    reason: str


@dataclass(slots=True)
class Session:
    """The requests of one call or episode: connection, output, what is to be sent, what has come."""

    connection: socket.socket
    output: int
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    reader: FrameReader = field(default_factory=FrameReader)
    begun: bool = False
    closed: bool = False
    status: int | None = None

    def hang_up(self) -> None:
        """End the connection, from any thread: a running request ends without an answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Handle:
    """One sandbox process and its keeper. A handle that is not `usable` any more is to be ended.

    `calls_left` is the number of calls until the process is to be replaced. `forks` says whether each
    call has a process of its own.
    """

    def __init__(
        self,
        keeper: socket.socket,
        control: socket.socket,
        output: int,
        log: OutputLog,
        calls: int,
        sweeps: bool,
    ) -> None:
        self.usable, self.forks = True, False
        self.calls_left = calls
        self._keeper = keeper
        self._control = control
        self._control_reader = FrameReader()
        self._output = output
        self._log = log
        self._sweeps = sweeps
        for connection in (keeper, control):
            connection.setblocking(False)
        os.set_blocking(output, False)

    def next_frame(self, end: float) -> dict[str, Any] | None:
        """Return the process's next frame, None if it ends first.

        Raise BrokenFrame, or TimeoutError at the time `end`.
        """
        while True:
            if (frame := self._control_reader.take()) is not None:
                return frame
            ready = self._wait({self._control.fileno(): select.POLLIN}, end, [self._output])
            if self._control.fileno() in ready and not self._read_control():
                return None

    def settled(self) -> None:
        """Tell the keeper to let live what the process has started until now."""
        self._command("settled")

    def call(self, request: bytes, timeout_s: float) -> Outcome:
        """Send a request to the process, and return its answer, or why there is none.

        A dict is the answer's frame, a text a mistake, a number the exit status of an ended process.
        None is a call over its time limit. What the call left is killed, unless `usable` is False
        afterwards: the caller has to `end` the process. Raise ProcessGone if it had ended before.
        """
        session = self.open()
        try:
            return self._finish(session, self.ask(session, request, timeout_s))
        finally:
            session.connection.close()
            os.close(session.output)

    def open(self) -> Session:
        """Begin a session, the only one of the process. Raise ProcessGone if that has ended."""
        connection, theirs = socket.socketpair()
        output, their_output = os.pipe()
        connection.setblocking(False)
        os.set_blocking(output, False)
        try:
            socket.send_fds(self._control, [b"c"], [theirs.fileno(), their_output])
        except OSError as error:
            connection.close()
            os.close(output)
            raise ProcessGone from error
        finally:
            theirs.close()
            os.close(their_output)
        return Session(connection, output)

    def ask(self, session: Session, request: bytes, timeout_s: float) -> Outcome:
        """Send a request of a session; return its outcome as `call` does, and raise ProcessGone."""
        if _has_more(session):
            self.usable = False
            return "sent more than its answer"
        session.unsent = memoryview(request)
        return self._exchange(session, time.monotonic() + timeout_s)

    def close_session(self, session: Session) -> None:
        """End a session, and kill what it left. If that fails, `usable` is False afterwards."""
        session.hang_up()
        if self.usable:
            self._sweep(session)
        self._drain(session.output)
        session.connection.close()
        os.close(session.output)

    def end(self) -> int | None:
        """Kill the process and all below it; return its exit status, None if unknown or after 30 s."""
        self.usable = False
        try:
            self._command("end")
            answer = self._keeper_answer()
        except OSError:  # somebody has killed the keeper, and the kernel its process
            answer = {}
        for connection in (self._keeper, self._control):
            connection.close()
        with contextlib.suppress(OSError):
            os.close(self._output)
        self._output = -1
        return answer.get("status")

    def _exchange(self, call: Session, end: float) -> Outcome:
        """Send and receive until an answer is there or there will be none; return as `call`."""
        try:
            while not (call.closed or call.status is not None):
                self._step(call, end)
                if (answer := call.reader.take()) is not None:
                    return answer
        except TimeoutError:
            self.usable = False
            return None
        except BrokenFrame as error:
            self.usable = False
            return f"sent {error}"
        return self._without_answer(call)

    def _step(self, call: Session, end: float) -> None:
        """Wait for something to happen, and take it in. Raise TimeoutError, BrokenFrame."""
        control, connection = self._control.fileno(), call.connection.fileno()
        wish = select.POLLIN | (select.POLLOUT if call.unsent else 0)
        ready = self._wait({control: select.POLLIN, connection: wish}, end, [call.output, self._output])
        if control in ready:
            if not self._read_control():
                self.usable, call.closed = False, True
            self._take_control(call)
        self._move(call)

    def _take_control(self, call: Session) -> None:
        """Take the frames that have come on the control connection. Raise BrokenFrame."""
        while call.status is None and (frame := self._control_reader.take()) is not None:
            if frame == {"begun": True} and not call.begun:
                call.begun = True
            else:
                call.status = _status_of(frame)

    def _move(self, call: Session) -> None:
        """Send and receive what the call's connection takes and has now. Raise BrokenFrame."""
        try:
            while call.unsent:
                call.unsent = call.unsent[call.connection.send(call.unsent[:_PIECE]) :]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            call.unsent = memoryview(b"")
        try:
            while not call.reader.whole and not call.closed:
                piece = call.connection.recv(_PIECE)
                call.reader.feed(piece)
                call.closed = not piece
        except BlockingIOError:
            pass
        except OSError:  # closed before the request was read
            call.closed = True

    def _without_answer(self, call: Session) -> Outcome:
        """Return what became of a call whose process ended or closed its connection without an answer.

        Raise ProcessGone if the call has not begun.
        """
        if call.status is None and self.usable:
            self._sweep(call)
        if call.status is None:
            call.status = self.end()
        if not call.begun:
            raise ProcessGone
        if call.reader.partial:
            return "ended in the middle of its answer"
        return "closed the connection for its answer" if call.status is None else call.status

    def _finish(self, call: Session, outcome: Outcome) -> Outcome:
        """Kill what the call left, log its last output, and return the outcome of the call."""
        self.calls_left -= 1
        if self.usable:
            self._sweep(call)
        self._drain(call.output)
        if isinstance(outcome, dict):
            with contextlib.suppress(OSError, BrokenFrame):
                call.reader.feed(call.connection.recv(_PIECE))
            if call.reader.partial:
                self.usable = False
                return "sent more than its answer"
        return outcome

    def _sweep(self, call: Session) -> None:
        """Let the keeper kill what the call left, the process report its end; else clear `usable`.

        Built-in code starts no processes, so that nothing is left to kill.
        """
        try:
            with contextlib.suppress(TimeoutError):  # nearly always there is nothing left to kill
                self._await_end(call, _SOON_S)
            if self._sweeps and self.usable:
                self._command("sweep")
                self.usable = self._keeper_answer().get("clean", False)
            self._await_end(call, _AFTERWARDS_S)
        except (OSError, BrokenFrame):
            self.usable = False

    def _await_end(self, call: Session, timeout_s: float) -> None:
        """Wait until the process has reported the end of a call, or has ended itself.

        Raise TimeoutError or BrokenFrame.
        """
        end = time.monotonic() + timeout_s
        self._take_control(call)
        while self.usable and call.status is None:
            self._wait({self._control.fileno(): select.POLLIN}, end, [self._output])
            self.usable = self._read_control()
            self._take_control(call)

    def _command(self, command: str) -> None:
        """Send a command to the keeper. Raise OSError if that has ended."""
        self._keeper.send(frames.pack(command))

    def _keeper_answer(self) -> dict[str, Any]:
        """Return the keeper's next answer; an empty one if the keeper ended. Raise TimeoutError."""
        reader, end = FrameReader(), time.monotonic() + _KEEPER_S
        while (answer := reader.take()) is None:
            self._wait({self._keeper.fileno(): select.POLLIN}, end, [self._output])
            with contextlib.suppress(BlockingIOError):
                piece = self._keeper.recv(_PIECE)
                if not piece:
                    return {}
                reader.feed(piece)
        return answer

    def _read_control(self) -> bool:
        """Read what the process has sent; return False if it has ended. Raise BrokenFrame."""
        try:
            piece = self._control.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._control_reader.feed(piece)
        return bool(piece)

    def _wait(self, events: dict[int, int], end: float, outputs: list[int]) -> set[int]:
        """Wait for one of the events; return the descriptors that are ready. Log output meanwhile.

        Raise TimeoutError at the time `end`.
        """
        poll = select.poll()
        for number, wish in (events | dict.fromkeys(outputs, select.POLLIN)).items():
            poll.register(number, wish)
        ready: set[int] = set()
        while not ready:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for number, event in poll.poll(1000 * left + 1):
                if number in events:
                    ready.add(number)
                elif not self._drain(number) or event & _ABNORMAL:
                    poll.unregister(number)
        return ready

    def _drain(self, output: int) -> bool:
        """Log the output that has come; return False if there will be no more."""
        try:
            data = os.read(output, _PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._log.add(data)
        return bool(data)


def _has_more(session: Session) -> bool:
    """Return whether bytes have come that belong to no request: the next answer would be of the last."""
    try:
        waiting = session.connection.recv(1, socket.MSG_PEEK)
    except OSError:
        waiting = b""
    return session.reader.partial or bool(waiting)


def _status_of(frame: dict[str, Any]) -> int:
    """Return the exit status in the frame `ended` of a process. Raise BrokenFrame for another frame."""
    status = frame.get("ended")
    if not isinstance(status, int):
        found = ", ".join(map(str, frame))[:80]
        raise BrokenFrame(f"an answer with {found}, expected its exit status: {frames.FOREIGN}")
    return status


def describe_status(status: int, section: str, memory_gib: float) -> str:
    """Return the text of a mistake for the exit status of a process that ended in a call."""
    if status == OUT_OF_MEMORY:
        return f"needs more memory than {section}_MEMORY_GIB={memory_gib:g} allows"
    return f"killed its process (exit code {status})"


def outcome_of(outcome: Outcome, settings: SandboxSettings, timeout_s: float) -> Any | Mistake:
    """Return the result in an outcome, or a Mistake. `timeout_s` was the call's limit in seconds."""
    if outcome is None:
        return Mistake(f"took more than {timeout_s:g} s")
    if isinstance(outcome, str):
        return Mistake(outcome)
    if isinstance(outcome, int):
        return Mistake(describe_status(outcome, settings.section, settings.memory_gib))
    if isinstance(mistake := outcome.get("mistake"), str):
        return Mistake(frames.short(mistake))
    if outcome.keys() != {"value"}:
        return Mistake("sent an answer without a result")
    return outcome["value"]
