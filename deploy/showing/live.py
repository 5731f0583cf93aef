"""What `penstock up` shows of a running run: a live screen in a terminal, or a line every 30 s."""

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.common.config.command import escape_missing_characters
from penstock.common.monitor.limit import Cause, Fault
from penstock.common.monitor.overview import Overview
from penstock.common.monitor.screen import duration, render
from penstock.common.monitor.watch import PeriodicOverview, RunWatch, progress_line
from penstock.common.text import printable
from penstock.deploy.child import Report
from penstock.deploy.devices import LEARNER

_REFRESH_S, _HEARTBEAT_S, _JOIN_S = 2.0, 30.0, 5.0
_KEPT_LINES, _JOINING_S = 200, 600.0
STOPPING = (
    "Stopping: the learner writes a checkpoint, mostly in seconds, at most in ten minutes; the others "
    "end too. Once more Ctrl-C ends everything at once."
)
_PID = re.compile(r"\d+")
_LINE = re.compile(r"(?:\d{4}-\d\d-\d\d )?(?P<time>\d\d:\d\d:\d\d) \[(?P<level>\w+) *\] (?P<text>.*)")


class Show:
    """A thread that calls `_show` until the `with` block ends. Base of the two ways to show a run.

    `notice` is shown in place of what limits the run, once the run is ending: what stands still then is
    no fault.
    """

    def __init__(self, watch: RunWatch) -> None:
        self.notice = ""
        self._looks = PeriodicOverview(watch)
        self._started: dict[str, tuple[str, float]] = {}  # by role: pid and time of the newest start
        self._failures: dict[str, list[str]] = {}  # by process: how it ended, since its role was there
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="show", daemon=True)

    def __enter__(self) -> "Show":
        """Start the thread, and one that looks, and return self, which takes reports."""
        self._looks.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread, in up to 5 s, and close the connection. The block's error passes."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        self._looks.__exit__()

    def _show(self) -> None:
        """Show the run until `_ended` is set. Abstract here."""
        raise NotImplementedError

    def __call__(self, report: Report) -> None:
        """Take a line or event of a process, and remember which processes were started."""
        role = report.child.partition(".")[0]
        if report.kind == "started" and (found := _PID.search(report.text)):
            self._started[role] = (found[0], time.monotonic())
        elif report.kind == "ended":
            self._started.pop(role, None)
            how, again, _ = report.text.partition(" It starts again")
            if again and not how.startswith("Ended with exit code 0 "):
                self._failures.setdefault(report.child, []).append(how)
            if report.text.endswith("The run stops."):
                self.notice = f"The run stops, because {report.child} failed."

    def look(self) -> tuple[Overview | None, str]:
        """Return the overview and the sentence of the watch, or one on the stop or a start that goes on.

        A process that was started and has not joined yet is no missing one, unless it failed twice.
        """
        now, sentence = self._looks.latest()
        if self.notice:
            return now, self.notice
        absent = sentence.missing if isinstance(sentence, Cause) else ""
        if failure := self._failure(now, absent):
            return now, failure
        for role, (pid, since) in list(self._started.items()):
            names = [now.learner.holder, *now.workers] if now else []
            joined = any(re.search(rf"\b{pid}\b", name) for name in names)
            if role == absent and not joined and time.monotonic() - since < _JOINING_S:
                why = "vLLM takes a minute to start" if role == "actor" else "it imports its libraries"
                return now, f"The {role} starts, since {duration(time.monotonic() - since)}: {why}."
        return now, sentence

    def _failure(self, now: Overview | None, absent: str) -> Fault | None:
        """Return a sentence on a process of the role `absent` that failed twice, None without one.

        Failures of a role that has a process by now are forgotten.
        """
        for child, ends in list(self._failures.items()):
            role = child.partition(".")[0]
            if now and (now.running(role) or role == LEARNER != absent):
                del self._failures[child]
            elif role == absent and len(ends) > 1:
                why = (
                    "That is mostly for lack of memory."
                    if "SIGKILL" in ends[-1]
                    else "Its log says why."
                )
                return Fault(f"{child} failed {len(ends)} times. {ends[-1]} {why}", role)
        return None


class ProgressPrinter(Show):
    """Passes all reports to `report`, and every 30 s one on the run: step, reward, what limits it."""

    def __init__(self, watch: RunWatch, report: Callable[[Report], None]) -> None:
        super().__init__(watch)
        self._report = report

    def __call__(self, report: Report) -> None:
        """Pass on a line or event of a process."""
        super().__call__(report)
        self._report(report)

    def _show(self) -> None:
        """Report the line every 30 s, and at once when the run stands still."""
        reported_at, had_fault = time.monotonic(), False
        while not self._ended.wait(_REFRESH_S):
            now, sentence = self.look()
            fault = isinstance(sentence, Fault)
            if time.monotonic() - reported_at >= _HEARTBEAT_S or (fault and not had_fault):
                reported_at = time.monotonic()
                self._report(Report("run", "run", progress_line(now, sentence)))
            had_fault = fault


class LiveScreen(Show):
    """The live screen on the terminal of `console`, with the newest lines of the processes below."""

    def __init__(self, watch: RunWatch, console: Console | None = None) -> None:
        super().__init__(watch)
        self._console = console or Console(file=sys.stdout)
        escape_missing_characters(self._console.file)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def __call__(self, report: Report) -> None:
        """Keep a report for the screen if a person needs to see it; see `line_for_people`."""
        super().__call__(report)
        if line := line_for_people(report):
            self._lines.append(line)

    def _show(self) -> None:
        """Draw the screen every two seconds, at the terminal's present size."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            while not self._ended.wait(_REFRESH_S):
                now, sentence = self.look()
                try:
                    size, encoding = self._console.size, self._console.encoding
                    screen = render(now, sentence, list(self._lines), *size, encoding)
                except Exception as error:  # of what other clients wrote; the run goes on
                    screen = Text(printable(f"{sentence}\nThe screen cannot be drawn: {error!r}"))
                live.update(screen, refresh=True)


def line_for_people(report: Report) -> str:
    """Return a report as a line for the screen, "" if it is for the log files alone.

    Shown are starts and ends, the learner's lines of level info, and warnings and errors of all; lines
    in another form, such as a library's, are for the log files. Example: "12:00:01 learner.1 Step 3/100:
    reward 0.4".
    """
    if report.kind != "output":
        return f"{report.child} {report.text}"
    found = _LINE.fullmatch(report.text)
    if found is None:
        return ""
    levels = {"warning", "error", "critical", "info" if report.child.startswith("learner") else ""}
    wanted = found["level"] in levels
    return f"{found['time']} {report.child} {found['text']}" if wanted else ""


def is_live(console: Console, plain: bool) -> bool:
    """Return whether a live screen can be drawn: on a terminal that is not "dumb", without --plain."""
    return console.is_terminal and not console.is_dumb_terminal and not plain
