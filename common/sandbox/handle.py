"""The pool's end of one sandbox process: a keeper's connection, and the calls of the process below it.

Nothing that the process sends is trusted: its frames are checked, and its end is learned from closed
connections and from the keeper. Whatever the process does, at most this handle becomes unusable.
"""

import contextlib
import os
import select
import signal
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


_LOST = "closed the connection for its answer"
KILLED = (-signal.SIGKILL, _LOST)
"""Outcomes that need not be the code's doing: it had to be killed, or another program did that."""

Outcome = dict[str, Any] | str | int | None
"""Of a call: the frame of an answer, a mistake, the exit status of a process, None at the time limit."""


class ProcessGone(Exception):
    """The process had ended before it received a call, so the call may be made in another process."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """The reason why a call has no result. If `killed`, something else may have ended its process."""

    reason: str
    killed: bool = False


@dataclass(slots=True)
class Session:
    """The requests of one call or episode, on a connection and an output pipe of their own.

    `output` is the descriptor that the output is read from, `unsent` the rest of a request. `begun` says
    that the process has reported the begin, `closed` that the connection has ended. `status` is the exit
    status that the process has reported for the end, None before.
    """

    connection: socket.socket
    output: int
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    reader: FrameReader = field(default_factory=FrameReader)
    begun: bool = False
    closed: bool = False
    status: int | None = None

    def hang_up(self) -> None:
        """Shut the connection down, from any thread; no error if it has ended before.

        A request that waits in another thread ends without an answer. No descriptor is closed.
        """
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class Handle:
    """One sandbox process and its keeper. A handle that is not `usable` any more is to be ended.

    `keeper` and `control` are connections to the keeper and to the process, `output` the pipe of what
    the process prints, which goes to `log`. All three become non-blocking, and `end` closes them.
    `calls_left`, at first `calls`, is the number of calls until the process is to be replaced. `usable`
    is True at first. `forks`, at first False, says whether each call has a process of its own. `sweeps`
    says whether the keeper kills what each call left.
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
        """Wait for the next frame that the process sends on the control connection, and return it.

        Return None if the process ends first. What the process prints meanwhile is logged. Raise
        BrokenFrame for bytes that are no frame, TimeoutError at `end`, a time of time.monotonic.
        """
        while True:
            if (frame := self._control_reader.take()) is not None:
                return frame
            ready = self._wait({self._control.fileno(): select.POLLIN}, end, [self._output])
            if self._control.fileno() in ready and not self._read_control():
                return None

    def settled(self) -> None:
        """Tell the keeper that later sweeps must not kill what the process has started until now.

        Wait for the keeper's answer: on a busy machine the keeper would otherwise also spare what the
        first call starts. Raise ConnectionResetError or another OSError if the keeper has ended,
        TimeoutError without an answer after 30 s.
        """
        self._command("settled")
        if "settled" not in self._keeper_answer():
            raise ConnectionResetError(
                "the keeper of a sandbox process has ended, expected its answer: end this Handle and "
                "start another by Starter.start"
            )

    def call(self, request: bytes, timeout_s: float) -> Outcome:
        """Send a packed `request` to the process in a new session, and return the outcome.

        A dict is the answer's frame, a text says what the process did wrong, a number is the exit status
        of an ended process (-9: signal 9), and None means no answer within `timeout_s` seconds. What the
        call prints is logged, and `calls_left` is one lower. What the call left is killed, unless
        `usable` is False afterwards: the caller has to `end` the process. Raise ProcessGone if the
        process ended before the call began; `calls_left` stays as it was then.
        """
        session = self.open()
        try:
            return self._finish(session, self.ask(session, request, timeout_s))
        finally:
            session.connection.close()
            os.close(session.output)

    def open(self) -> Session:
        """Send the process its ends of a new connection and output pipe; return ours, as a Session.

        A process has one session at a time. Raise ProcessGone if the process has ended.
        """
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
        """Send a packed `request` in a session, and return the outcome.

        A dict is the answer's frame, a text says what the process did wrong, a number is the exit status
        of an ended process (-9: signal 9), and None means no answer within `timeout_s` seconds. If bytes
        beyond the last answer have come, nothing is sent, and the outcome is a text. After this text,
        None, a broken frame, or the end of the process itself (not only of a session's fork), `usable`
        is False. What is printed is logged. Raise ProcessGone if the process ended before the session
        began.
        """
        if _has_more(session):
            self.usable = False
            return "sent more than its answer"
        session.unsent = memoryview(request)
        return self._exchange(session, time.monotonic() + timeout_s)

    def close_session(self, session: Session) -> None:
        """End a session, kill what it left, log up to 64 KiB of its last output, close its descriptors.

        If killing fails or the process has ended, `usable` is False afterwards. If `usable` was False
        before, nothing is killed here: the caller has to `end` the process.
        """
        session.hang_up()
        if self.usable:
            self._sweep(session)
        self._drain(session.output)
        session.connection.close()
        os.close(session.output)

    def end(self) -> int | None:
        """Kill the process and all below it, and close the connections; `usable` is False afterwards.

        Return the exit status of the process, -9 for signal 9; None if the keeper is gone, does not know
        the status, or does not answer for 30 s. What the process prints meanwhile is logged.
        A second call returns None.
        """
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
        """Send `call.unsent` and wait for the answer; return the outcome. What is printed is logged.

        A dict is the answer's frame. At `end`, a time of time.monotonic, the outcome is None; for a
        broken frame it is a text. Both make `usable` False. If the process ended or closed the
        connection, the outcome is its exit status or a text, and what it left is killed. Raise
        ProcessGone if it ended before the call began.
        """
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
        """Wait until a connection is ready; then send and receive what is possible without waiting.

        What came is stored in the fields `reader`, `begun`, `status` and `closed` of `call`; `unsent`
        loses what was sent. Output is logged meanwhile. If the process has ended, `usable` becomes False
        and `call.closed` True. Raise TimeoutError at `end`, a time of time.monotonic, and BrokenFrame
        for bytes that are no frame.
        """
        control, connection = self._control.fileno(), call.connection.fileno()
        wish = select.POLLIN | (select.POLLOUT if call.unsent else 0)
        ready = self._wait({control: select.POLLIN, connection: wish}, end, [call.output, self._output])
        if control in ready:
            if not self._read_control():
                self.usable, call.closed = False, True
            self._take_control(call)
        self._move(call)

    def _take_control(self, call: Session) -> None:
        """Take the frames that have come on the control connection, up to the one that ends `call`.

        The frame `begun` sets `call.begun` to True, `ended` sets `call.status` to the exit status in it.
        Raise BrokenFrame for any other frame, and for a second `begun`.
        """
        while call.status is None and (frame := self._control_reader.take()) is not None:
            if frame == {"begun": True} and not call.begun:
                call.begun = True
            else:
                call.status = _status_of(frame)

    def _move(self, call: Session) -> None:
        """Send of `call.unsent` what the connection takes, and store in `call.reader` what has come.

        Nothing is waited for; a whole frame ends the reading. `call.unsent` is empty if nobody reads any
        more, `call.closed` True if the connection has ended. Raise BrokenFrame for over 4 MiB.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                while call.unsent:
                    call.unsent = call.unsent[call.connection.send(call.unsent[:_PIECE]) :]
        except OSError:  # nobody reads any more
            call.unsent = memoryview(b"")
        try:
            with contextlib.suppress(BlockingIOError):
                while not call.reader.whole and not call.closed:
                    piece = call.connection.recv(_PIECE)
                    call.reader.feed(piece)
                    call.closed = not piece
        except OSError:  # closed before the request was read
            call.closed = True

    def _without_answer(self, call: Session) -> Outcome:
        """Return why `call` has no answer, after its process ended or closed the connection.

        Without a reported exit status, what the call left is killed and the report awaited; if none
        comes, the process is ended, and `usable` False. The result is a text for a part of an answer or
        an unknown status, else the exit status. Raise ProcessGone if the call has not begun.
        """
        if call.status is None and self.usable:
            self._sweep(call)
        if call.status is None:
            call.status = self.end()
        if not call.begun:
            raise ProcessGone
        if call.reader.partial:
            return "ended in the middle of its answer"
        return _LOST if call.status is None else call.status

    def _finish(self, call: Session, outcome: Outcome) -> Outcome:
        """Lower `calls_left` by 1, kill what the call left, log its last output, and return `outcome`.

        Nothing is killed if `usable` is False. If bytes have come after an answer, `usable` becomes
        False, and a text is returned instead of `outcome`.
        """
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
        """Wait 0.05 s for the process to report the call's end, then let the keeper kill what is left.

        Then wait for the report again. `usable` becomes False if the keeper cannot kill all or does not
        answer for 30 s, the process has ended or sends a broken frame, or no report comes within 2 s
        after the killing; no error is raised. Without `sweeps`, for built-in code, which starts no
        processes, the keeper is not asked.
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
        """Wait until the process has reported the end of `call`, and store the exit status there.

        Return also if the process has ended; `usable` is False then. What is printed meanwhile is
        logged. Raise TimeoutError after `timeout_s` seconds, BrokenFrame for a wrong frame.
        """
        end = time.monotonic() + timeout_s
        self._take_control(call)
        while self.usable and call.status is None:
            self._wait({self._control.fileno(): select.POLLIN}, end, [self._output])
            self.usable = self._read_control()
            self._take_control(call)

    def _command(self, command: str) -> None:
        """Send the keeper a `command`: settled, sweep or end. Raise OSError if the keeper has ended."""
        self._keeper.send(frames.pack(command))

    def _keeper_answer(self) -> dict[str, Any]:
        """Wait for the keeper's next frame, and return it; {} if the keeper closes the connection.

        What the process prints meanwhile is logged. Raise TimeoutError after 30 s.
        """
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
        """Store up to 64 KiB that have come on the process's control connection, for its frames.

        Return False if the process has closed the connection, or it fails, else True, also without new
        bytes. Raise BrokenFrame for a frame over 4 MiB.
        """
        try:
            piece = self._control.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._control_reader.feed(piece)
        return bool(piece)

    def _wait(self, events: dict[int, int], end: float, outputs: list[int]) -> set[int]:
        """Wait until a descriptor in `events`, with its poll(2) events, is ready; return all that are.

        What comes from the descriptors `outputs` meanwhile is logged. Raise TimeoutError at `end`, a
        time of time.monotonic.
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
        """Read up to 64 KiB of what has come from the descriptor `output`, and log the lines.

        Return False if the output has ended or cannot be read, else True, also without new bytes.
        """
        try:
            data = os.read(output, _PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._log.add(data)
        return bool(data)


def _has_more(session: Session) -> bool:
    """Return True if bytes beyond the last answer have come, which would be taken for the next answer.

    The bytes stay where they are. A closed or failed connection has none.
    """
    try:
        waiting = session.connection.recv(1, socket.MSG_PEEK)
    except OSError:
        waiting = b""
    return session.reader.partial or bool(waiting)


def _status_of(frame: dict[str, Any]) -> int:
    """Return the exit status in a process's frame {"ended": status}.

    Raise BrokenFrame if the frame has no whole number there.
    """
    status = frame.get("ended")
    if not isinstance(status, int):
        found = ", ".join(map(str, frame))[:80]
        raise BrokenFrame(f"an answer with {found}, expected an exit status: {frames.FOREIGN}")
    return status


def describe_status(status: int, section: str, memory_gib: float) -> str:
    """Return the text of a mistake for the exit `status` of a process that ended in a call.

    For OUT_OF_MEMORY, 77, the text names the memory setting, REWARDER_MEMORY_GIB with the `section`
    "REWARDER", and its value `memory_gib`. For any other status it is "killed its process (exit code
    N)"; with SIGKILL the machine may have done that too.
    """
    if status == OUT_OF_MEMORY:
        return f"needs more memory than {section}_MEMORY_GIB={memory_gib:g} allows"
    others = ", or the machine had no memory left" if status == -signal.SIGKILL else ""
    return f"killed its process (exit code {status}){others}"


TOO_LONG = "took more than"
"""The begin of a Mistake's reason if the call was ended at its limit of time."""


def outcome_of(outcome: Outcome, settings: SandboxSettings, timeout_s: float) -> Any | Mistake:
    """Return the value in the outcome of a call, a dict with exactly the key `value`; else a Mistake.

    The Mistake says that the call took over `timeout_s` seconds (None), has the text (str), describes
    the exit status (int), or has the frame's `mistake`, cut to 500 characters. Any other frame gives one
    too. `settings` have the memory limit and the setting's prefix, which an exit for lack of memory
    names.
    """
    if outcome is None:
        return Mistake(f"{TOO_LONG} {timeout_s:g} s")
    if isinstance(outcome, str):
        return Mistake(outcome)
    if isinstance(outcome, int):
        text = describe_status(outcome, settings.section, settings.memory_gib)
        return Mistake(text, outcome in KILLED)
    if isinstance(mistake := outcome.get("mistake"), str):
        return Mistake(frames.short(mistake))
    if outcome.keys() != {"value"}:
        return Mistake("sent an answer without a result")
    return outcome["value"]
