"""What `penstock up` writes to log files, shows in a terminal, and prints at the end."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from penstock.common import queues
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.config.command import load
from penstock.common.errors import ConfigError, RunNotReady, ServerUnavailable
from penstock.common.files.run_folder import RunFolder
from penstock.common.monitor import watch as watch_module
from penstock.common.monitor.limit import Cause, Fault
from penstock.common.monitor.overview import Overview
from penstock.common.monitor.watch import PeriodicOverview, RunWatch
from penstock.deploy.child import Child, Report, Service
from penstock.deploy.showing import live
from penstock.deploy.showing.ending import LastWords, format_ending, print_ending
from penstock.deploy.showing.live import LiveScreen, ProgressPrinter, is_live, line_for_people
from penstock.deploy.showing.logs import LogFiles
from penstock.deploy.up import Printer, Up
from tests.common.builders import Run
from tests.common.test_limit import PROGRESS, RUNNING
from tests.helpers import wait_until


@pytest.fixture
def run(connection: Connection, keys: Keys) -> Run:
    """A run that its learner has set up."""
    return Run(connection, keys)


def line(child: str, text: str) -> Report:
    """A line of output."""
    return Report(child, "output", text)


def test_a_letter_that_the_terminal_lacks_does_not_end_the_reader_of_a_process() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Printer(file)(line("actor.1", "café"))
    file.flush()
    assert file.buffer.getvalue() == b"actor.1    | caf\\xe9\n"  # type: ignore[attr-defined]


def test_the_screen_works_in_a_terminal_without_unicode(monkeypatch) -> None:
    monkeypatch.setattr(live, "_REFRESH_S", 0.01)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=60, height=30, force_terminal=True)
    with LiveScreen(Fixed(RUNNING, "A sentence."), console) as show:
        show(Report("learner.1", "run", "é" * 100))
        wait_until(lambda: b"A sentence." in file.buffer.getvalue(), "the screen")  # type: ignore[attr-defined]
        assert show._thread.is_alive()
    assert file.buffer.getvalue().endswith(b"\x1b[?25h\x1b[?1049l")  # type: ignore[attr-defined]


def test_only_a_terminal_that_can_has_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    def console(**options: bool) -> Console:
        return Console(file=io.StringIO(), **options)  # type: ignore[arg-type]

    monkeypatch.setenv("TERM", "xterm")
    assert is_live(console(force_terminal=True), plain=False)
    assert not is_live(console(force_terminal=True), plain=True)
    assert not is_live(console(), plain=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(console(force_terminal=True), plain=False)


def test_each_attempt_of_a_process_has_a_log_of_its_own(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path)
    for attempt in (1, 2, 3):
        logs(Report("actor.1", "started", f"Started as process {attempt}."))
        logs(line("actor.1", f"line \ud800 of attempt {attempt} % 5"))
    logs(line("learner.1", "another"))
    logs.close()
    assert logs.path("actor.1").read_text().splitlines() == [
        "-- Started as process 3.", "line \\ud800 of attempt 3 % 5"
    ]  # fmt: skip
    assert "attempt 1" in (tmp_path / "actor.1.log.2").read_text()
    assert logs.path("learner.1").read_text() == "another\n"


def test_a_full_disk_loses_lines_and_nothing_else(capfd) -> None:
    logs = LogFiles(Path("/dev/null"))  # no file can be made below it
    logs(Report("actor.1", "started", "Started as process 1."))
    logs(line("actor.1", "a line"))
    logs.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (line("learner.1", "2026-11-27 12:00:01 [info     ] Step 3/9."), "12:00:01 learner.1 Step 3/9."),
        (line("learner.1", "12:00:01 [info     ] Step 3/9."), "12:00:01 learner.1 Step 3/9."),
        (line("actor.1", "12:00:01 [info     ] Generating."), ""),
        (line("actor.1", "12:00:01 [warning  ] Slow."), "12:00:01 actor.1 Slow."),
        (line("learner.1", "12:00:01 [debug    ] Detail."), ""),
        (line("actor.1", "FutureWarning: of a library"), ""),
        (Report("actor.1", "ended", "Killed by SIGKILL."), "actor.1 Killed by SIGKILL."),
    ],
)
def test_the_screen_shows_what_concerns_people(report: Report, shown: str) -> None:
    assert line_for_people(report) == shown


def test_without_a_terminal_a_line_tells_of_the_run(run: Run, run_name: str, monkeypatch) -> None:
    monkeypatch.setattr(live, "_REFRESH_S", 0.05)
    monkeypatch.setattr(watch_module, "_EVERY_S", 0.05)
    monkeypatch.setattr(live, "_HEARTBEAT_S", 3600.0)
    told: list[str] = []
    watch = RunWatch(lambda: run.connection, run_name)
    run.learner.beat(10.0, "waiting for groups")
    before = set(threading.enumerate())
    with ProgressPrinter(watch, lambda report: told.append(report.text)) as show:
        show(line("actor.1", "a line"))
        assert told == ["a line"]
        time.sleep(0.3)
        assert told == ["a line"]  # nothing stands still, and 30 s have not passed
        run.learner.beat(10.0, "leaving")
        wait_until(lambda: len(told) > 1, "the line on the learner that left")
    assert told[1] == "No learner runs. Nothing is lost: start it again to go on."
    assert set(threading.enumerate()) <= before


def test_a_watch_names_what_it_waits_for(run: Run, run_name: str) -> None:
    def no_server() -> Connection:
        raise ConfigError("no queue server is known: start one")

    now, sentence = RunWatch(no_server, run_name).look()
    assert (now, sentence) == (None, "Waiting for the queue server, since 0 s.")
    now, sentence = RunWatch(lambda: run.connection, "another").look()
    assert now is None
    assert sentence.startswith("Waiting for the learner, which imports its libraries")


def test_a_watch_connects_anew_after_its_server_left(run: Run, run_name: str) -> None:
    """The next `penstock up` has another address and another password."""

    class Left:
        closed = False

        def execute(self, *_: object) -> None:
            raise ServerUnavailable("the server left")

        call = execute

        def close(self) -> None:
            self.closed = True

    left = Left()
    servers: list[Any] = [left, run.connection]
    watch = RunWatch(lambda: servers.pop(0), run_name, "/data/x")
    assert watch.look()[0] is None
    assert left.closed
    now = watch.look()[0]
    assert now is not None
    assert now.folder == "/data/x"


def test_queues_watch_ends_with_a_run_whose_server_left_before_the_last_look(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setattr(queues, "_WATCH_EVERY_S", 0.01)
    place = ["--run.dir", str(tmp_path), "--run.name", "first"]
    watch = load(queues.Watch, "queues watch", ["--json", *place])
    left: tuple[Overview | None, str] = (None, "Waiting for the queue server.")
    progress = replace(PROGRESS, step=100)
    looks = [left, (RUNNING, "At step 37."), left, (replace(RUNNING, progress=progress), "Done."), left]

    class Seen:
        def latest(self) -> tuple[Overview | None, str]:
            return looks.pop(0)

    run = RunFolder(tmp_path / "first")
    run.path.mkdir()
    run.results("train").write_text("{}")
    watch._as_text(Seen(), threading.Event())  # type: ignore[arg-type]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["limit"] for one in told] == [
        left[1], "At step 37.", left[1], "Done.", "The run has ended."
    ]  # fmt: skip
    assert told[-1]["state"] == "ended"


class Fixed(RunWatch):
    """A watch that sees `now`, and says `sentence`."""

    def __init__(self, now: Overview | None, sentence: str) -> None:
        self._now, self._sentence = now, sentence

    def look(self) -> tuple[Overview | None, str]:
        return self._now, self._sentence

    def close(self) -> None:
        pass


def test_a_process_that_was_started_is_not_called_missing() -> None:
    sentence = Fault("No learner runs. Nothing is lost: start it again to go on.", "learner")
    show = ProgressPrinter(Fixed(RUNNING, sentence), lambda _: None)
    show._looks._seen = show._looks._watch.look()
    assert show.look()[1] == sentence
    show(Report("learner.1", "started", "Started as process 77."))
    assert show.look()[1].startswith("The learner starts, since 0 s: it imports")
    silent = Fault("No heartbeat from the learner for 48 s.", "learner")
    resumed = ProgressPrinter(Fixed(RUNNING, silent), lambda _: None)
    resumed._looks._seen = resumed._looks._watch.look()
    resumed(Report("learner.1", "started", "Started as process 77."))
    assert resumed.look()[1].startswith("The learner starts")
    waits = Cause("The first actor has not joined yet.", "actor")
    first = ProgressPrinter(Fixed(RUNNING, waits), lambda _: None)
    first._looks._seen = first._looks._watch.look()
    first(Report("actor.1", "started", "Started as process 78."))
    assert first.look()[1] == "The actor starts, since 0 s: vLLM takes a minute to start."
    show(Report("learner.1", "ended", "Killed by SIGKILL."))
    assert show.look()[1] == sentence
    show(Report("learner.1", "started", "Started as process 4711."))  # RUNNING's, which has joined
    assert show.look()[1] == sentence
    show(Report("learner.1", "ended", "Ended with exit code 79. The run stops."))
    assert show.look()[1] == "The run stops, because learner.1 failed."
    show.notice = live.STOPPING
    assert show.look()[1].startswith("Stopping: the learner writes a checkpoint")


def test_a_process_that_fails_again_and_again_is_named() -> None:
    waits = Cause("The first actor has not joined yet.", "actor")
    show = ProgressPrinter(Fixed(replace(RUNNING, workers={}), waits), lambda _: None)
    show._looks._seen = show._looks._watch.look()
    for _ in range(2):
        show(Report("actor.1", "started", "Started as process 78."))
        assert show.look()[1].startswith("The actor starts, since 0 s")
        end = "Ended with exit code 70 after 3.1 s."
        show(Report("actor.1", "ended", f"{end} It starts again in 2 s."))
    sentence = show.look()[1]
    assert sentence == f"actor.1 failed 2 times. {end} Its log says why."
    assert isinstance(sentence, Fault)
    show._looks._seen = (RUNNING, waits)  # an actor has joined
    assert show.look()[1] == waits
    show._looks._seen = (replace(RUNNING, workers={}), waits)
    assert show.look()[1] == waits


def test_a_learner_that_fails_before_its_claim_is_named(monkeypatch) -> None:
    def not_there(*_: object) -> None:
        raise RunNotReady("no learner has claimed the run")

    monkeypatch.setattr(watch_module, "read_overview", not_there)
    show = ProgressPrinter(RunWatch(Mock(), "run"), lambda _: None)
    show._looks._seen = show._looks._watch.look()
    assert show.look()[1].startswith("Waiting for the learner, which imports its libraries")
    for end in ("Ended with exit code 1 after 3.1 s.", "Killed by SIGKILL after 3.1 s."):
        show(Report("learner.1", "started", "Started as process 78."))
        assert show.look()[1].startswith("The learner starts, since 0 s")
        show(Report("learner.1", "ended", f"{end} It starts again in 2 s."))
    show._looks._seen, seen = (None, "Waiting for the queue server, since 2 s."), show._looks._seen
    assert show.look()[1].startswith("Waiting for the queue server")
    show._looks._seen = seen
    assert show.look()[1] == f"learner.1 failed 2 times. {end} That is mostly for lack of memory."
    show._looks._seen = (RUNNING, "All is well.")
    assert show.look()[1] == "All is well."
    show._looks._seen = seen
    assert show.look()[1].startswith("Waiting for the learner")


def test_a_server_that_hangs_stops_nobody(monkeypatch) -> None:
    monkeypatch.setattr(watch_module, "_SILENT_S", 0.05)
    hangs = threading.Event()

    class Hanging(Fixed):
        def look(self) -> tuple[Overview | None, str]:
            hangs.wait(60)
            return self._now, self._sentence

    with PeriodicOverview(Hanging(RUNNING, "All is well.")) as looks:
        wait_until(lambda: "does not answer" in looks.latest()[1], "the sentence on the server")
        assert looks.latest()[0] is None
        hangs.set()
        wait_until(lambda: looks.latest() == (RUNNING, "All is well."), "the first look")


def test_a_screen_that_cannot_be_drawn_does_not_end_its_thread(monkeypatch) -> None:
    monkeypatch.setattr(live, "_REFRESH_S", 0.01)
    monkeypatch.setattr(live, "render", lambda *_: 1 / 0)
    file = io.StringIO()
    console = Console(file=file, width=100, height=30, force_terminal=True)
    with LiveScreen(Fixed(RUNNING, "A sentence."), console) as show:
        wait_until(lambda: file.getvalue().count("cannot be drawn") > 1, "two tries to draw")
        assert show._thread.is_alive()


def write_run(folder: Path, steps: int) -> RunFolder:
    """A run's files as the learner writes them."""
    run = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    rows = [
        {"step": step, "reward": step / 100, "perf/step_s": 2.0, "num_tokens": 10, "groups/filtered": 3}
        for step in range(1, steps + 1)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [
        {"step": step, "rewards": [{"accuracy": float(right), "other": 9.0}]}
        for step, right in ((0, 0), (0, 1), (steps, 1), (steps, 1))
    ]
    run.evaluations.write_text("".join(json.dumps(row) + "\n" for row in answers))
    return run


def test_the_ending_has_before_after_and_what_to_type_next(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 40)
    run.final.mkdir()
    assert "The best" not in format_ending(run)
    run.best_link.mkdir(parents=True)
    text = format_ending(run)
    assert "reward         0.055     0.355    +0.300" in text
    assert "held-out       0.500     1.000    +0.500" in text
    assert "40 steps in 80 s: 400 tokens trained; 120 groups without spread" in text
    assert f"The model: {run.final}" in text
    assert f"The best model by the held-out questions: {run.best_link}" in text
    assert "Audit" not in text  # there is no journal
    assert f"penstock samples {run.path}" in text
    assert "stopped before its last step" in text
    assert "or to go on repeat the command." in text
    run.results("train").write_text("{}")
    text = format_ending(run)
    assert "stopped" not in text
    assert "for more steps raise LEARNER_MAX_STEPS and repeat the command." in text


def test_the_ending_of_a_start_that_had_nothing_to_train_says_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n' * 2)
    for made, trains, says in ((2, True, True), (1, True, False), (0, True, False), (2, False, False)):
        print_ending(RunFolder(tmp_path), "", trains=trains, made=made)
        assert ("trained nothing: 2 steps were made before" in capsys.readouterr().out) == says


def test_the_ending_of_a_run_without_a_step_says_so(tmp_path: Path, capsys) -> None:
    assert format_ending(RunFolder(tmp_path)) == ""
    print_ending(RunFolder(tmp_path), "", trains=False)
    assert capsys.readouterr().out == ""
    print_ending(RunFolder(tmp_path), "")
    said = capsys.readouterr().out
    assert said.startswith("\nThe run was stopped before its first step. To go on repeat the command.\n")
    assert f"Logs: {tmp_path / 'logs'}" in said


@pytest.mark.parametrize("terminal", [True, False])
def test_what_the_ending_names_can_be_copied(
    tmp_path: Path, capsys, monkeypatch, terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    run = write_run(tmp_path / "a-run-with-hyphens-and-a-long-name-of-its-own", 4)
    log = run.logs / "learner.1.log"
    failure = (
        f"learner.1 failed the run: {'many words ' * 9}\nIts log: {log}\n  penstock samples {run.path}"
    )
    print_ending(run, failure)
    said = capsys.readouterr().out.splitlines()
    assert (len(said) > 4) == terminal  # wrapped
    assert any(line.strip() in (f"Its log: {log}", str(log)) for line in said)
    print_ending(run, "")
    said = capsys.readouterr().out.splitlines()
    commands = [f"  penstock {name} {run.path}" for name in ("samples", "report")]
    assert [line for line in said if str(run.path) in line] == commands


@pytest.mark.parametrize(
    ("only", "variable", "trains"),
    [("", "", True), ("", "False", True), ("", "1", False), ("actor", "", False)],
)
def test_a_run_that_trains_is_told_from_others(
    monkeypatch, only: str, variable: str, trains: bool
) -> None:
    monkeypatch.setenv("LEARNER_EVALUATE_ONLY", variable)
    assert Up(only=only).trains() == trains


def test_a_failed_run_ends_with_the_error_and_its_log(tmp_path: Path) -> None:
    passed: list[Report] = []
    words = LastWords(passed.append)
    words(Report("learner.1", "started", "Started as process 1."))
    words(line("learner.1", "Traceback of something else"))
    words(line("learner.1", "learner: ConfigError: the model is missing:"))
    words(line("learner.1", "    copy it there"))
    words(line("learner.1", "another line"))
    words(line("learner.1", "    indented, of something else"))
    assert words.describe(tmp_path) == ""
    words(Report("learner.1", "ended", "Ended with exit code 78. A restart cannot help. The run stops."))
    text = words.describe(tmp_path)
    error = "learner: ConfigError: the model is missing:\n    copy it there"
    assert text.startswith(f"learner.1 failed the run: {error}")
    assert f"Its log: {tmp_path / 'learner.1.log'}" in text
    assert "of something else" not in text
    assert len(passed) == 7


def test_a_process_that_starts_again_after_an_error_is_read_on(tmp_path: Path) -> None:
    words = LastWords()
    words(line("learner.1", "learner: ServerUnavailable: the queue server does not answer"))
    words(Report("learner.1", "ended", "Ended with exit code 69. It starts again in 1 s."))
    words(Report("learner.1", "started", "Started as process 2."))
    words(line("learner.1", "reading the data set"))
    words(line("learner.1", "  an indented line"))
    words(Report("learner.1", "ended", "Killed by SIGKILL. The run stops."))
    said = words.describe(tmp_path, "try again")
    assert said.startswith(
        "learner.1 failed the run: Killed by SIGKILL. Its last line:   an indented line\n"
    )
    assert said.endswith("correct this and try again.")


def test_what_a_process_prints_does_not_reach_the_terminal_as_a_command(tmp_path: Path) -> None:
    hostile = line("actor.1", "value\x1b]52;c;bHM=\x07\x9b31m \u202e end\r")
    file, logs = io.StringIO(), LogFiles(tmp_path)
    for receive in (Printer(file), logs):
        receive(hostile)
        receive(Report("watch", "run", "No actor is running (a\x1b[2J was last seen 9 s ago)."))
    logs.close()
    printed = file.getvalue() + logs.path("actor.1").read_text() + logs.path("watch").read_text()
    assert printed.count("value\\x1b]52;c;bHM=\\x07\\x9b31m \\u202e end\\r\n") == 2
    assert all(letter.isprintable() or letter == "\n" for letter in printed)


def test_an_error_of_a_receiver_does_not_end_the_reader_of_a_process() -> None:
    """The process would be ended by SIGPIPE."""
    found: list[str] = []

    def receive(report: Report) -> None:
        if report.kind == "output":
            found.append(report.text)
            raise KeyError(report.child)

    command = [sys.executable, "-c", "for n in range(9): print(n, flush=True)"]
    child = Child(Service("it", tuple(command), 0), 1, receive)
    child.start(os.environ)
    assert child._process is not None
    wait_until(lambda: len(found) == 9, "all lines")
    assert wait_until(lambda: child.reap() is not None, "the end")


def test_an_error_of_many_lines_is_cut(tmp_path: Path) -> None:
    words = LastWords()
    words(line("learner.1", "learner: ConfigError: many:"))
    for number in range(1000):
        words(line("learner.1", f"    {number}"))
    words(Report("learner.1", "ended", "Ended with exit code 78. The run stops."))
    assert words.describe(tmp_path).count("\n") < 60
