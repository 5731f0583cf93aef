"""No command and no log line passes on to a terminal what others wrote for the terminal to execute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from penstock import console
from penstock.common.config import command as command_module
from penstock.common.config.command import Command, execute_command
from penstock.common.files.run_folder import RunFolder
from penstock.common.log import configure_logs, get_logger
from penstock.common.queues import Queues
from penstock.common.text import as_block, one_line, printable
from penstock.deploy.__main__ import Penstock
from penstock.deploy.child import Child, Report, Service
from penstock.deploy.up import Printer
from tests.common.builders import Run
from tests.common.test_monitor import busy  # noqa: F401
from tests.helpers import wait_until

FORGED = "00:00:00 [error    ] forged"

HOSTILE = {
    "control": "".join(map(chr, (*range(10), *range(11, 32)))),
    "clear": "\x1b[2J\x1b[H",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "device": "\x1bP$q\x1b\\",
    "c1": "".join(map(chr, range(0x7F, 0xA0))),
    "direction": "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c",
    "no width": "\u200b\u200c\u200d\u2060\ufeff\u00ad",
    "tags": "\U000e0001\U000e0041\U000e007f",
    "separators": "\u2028\u2029\x85\x0b\x0c",
    "surrogate": "\udfff\ud800",
    "line": f"\n{FORGED}",
    "return": f"\r{FORGED}",
}


EVERYTHING = "".join(HOSTILE.values())


def is_clean(output: str) -> bool:
    """Whether a terminal shows the output and does nothing else, and no line is forged."""
    lines = output.split("\n")
    return all(map(str.isprintable, lines)) and not any(line.startswith(FORGED) for line in lines)


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> str:
    return f"a{HOSTILE[request.param]}z"


@pytest.fixture
def sendable(hostile: str) -> bytes:
    """The text as another client sends it; the server's replies are UTF-8."""
    return hostile.encode("utf-8", "replace")


def test_a_text_keeps_its_letters(hostile):
    for found in (one_line(hostile), as_block(hostile)):
        assert is_clean(found)
        assert (found[0], found[-1]) == ("a", "z")
    assert printable("Größe 数 ∑\n") == "Größe 数 ∑\n"


def test_characters_that_nobody_sees_and_piles_of_accents_are_escaped():
    assert printable("a\u3164b\u034fc\U000e0100") == "a\\u3164b\\u034fc\\U000e0100"
    assert printable("o" + "\u0301" * 6) == "o" + "\u0301" * 4 + "\\u0301" * 2
    assert printable("⚠\ufe0f é") == "⚠\ufe0f é"


def test_a_log_line_is_one_line(hostile, capfd):
    configure_logs("test", "text")
    log = get_logger("test")
    log.warning(
        hostile, text=hostile, spaced=f"{hostile} b", nested=[{hostile: hostile}], path=Path("a")
    )
    log.warning("odd", **{hostile: 1})
    try:
        raise ValueError(hostile)
    except ValueError:
        log.exception("failed")
    printed = capfd.readouterr().err
    assert is_clean(printed)
    starts = [line for line in printed.splitlines() if line[:2].isdigit()]
    assert len(starts) == 3


def test_a_log_line_of_json_keeps_the_text(hostile, capfd):
    configure_logs("test", "json")
    get_logger("test").warning(hostile, text=hostile)
    printed = capfd.readouterr().err
    assert is_clean(printed)
    assert json.loads(printed)["event"] == json.loads(printed)["text"] == hostile


def test_a_log_line_of_json_names_the_role_in_each_thread(capfd):
    configure_logs("test", "json")
    log = get_logger("test")
    thread = threading.Thread(target=log.info, args=["there"])
    thread.start()
    thread.join()
    log.info("here")
    lines = map(json.loads, capfd.readouterr().err.splitlines())
    assert [(line["event"], line["role"]) for line in lines] == [("there", "test"), ("here", "test")]


@pytest.mark.parametrize("command", [["status"], ["audit"], ["dead"]])
def test_queues_print_what_others_wrote_harmlessly(busy: Run, run_name, capfd, command):  # noqa: F811
    hostile = EVERYTHING.encode("utf-8", "replace")
    keys, execute = busy.keys, busy.connection.execute
    lines = {}
    for written in (b"plain", hostile):
        execute("SET", keys.state, written)
        execute("HSET", keys.ledger, written, 1)
        execute("XGROUP", "CREATECONSUMER", keys.tickets, "workers", written)
        if written == hostile:  # the audit names who holds a ticket
            execute("XREADGROUP", "GROUP", "workers", written, "COUNT", 1, "STREAMS", keys.tickets, ">")
        execute("XADD", keys.dead, "*", "t", written, "reason", written)
        capfd.readouterr()
        execute_command(Queues, "queues", [*command, "--run.name", run_name])
        printed = capfd.readouterr()
        assert printed.err == ""
        assert is_clean(printed.out)
        lines[written] = printed.out.count("\n")
        execute_command(Queues, "queues", [*command, "--json", "--run.name", run_name])
        json_lines = capfd.readouterr().out
        assert json_lines.isascii()
        assert all(map(json.loads, json_lines.splitlines()))
        if command == ["dead"]:
            assert json.loads(json_lines.splitlines()[0])["reason"] == written.decode()
    grown = {"status": 1, "audit": 1, "dead": 1}[command[0]]  # the consumer, the holder, the letter
    assert lines[hostile] - lines[b"plain"] == grown


def test_samples_print_what_the_model_and_rewards_wrote_harmlessly(tmp_path, hostile, capfd):
    written = hostile.encode("utf-8", "replace").decode()
    row = {
        "step": 1, "ticket": written, "index": 0, "prompt": written, "completion": written,
        "solution": written, "state": written, "reward": 1.0, "advantage": 0.0, "accuracy": 1.0,
        "completion_length": 3, "finish_reason": "stop", "staleness_mean": 0.0, "staleness_max": 0,
        "versions": "1:0-3", "actors": written, "failure": written, written: 1.0,
        "extra": json.dumps({written: written}),
    }  # fmt: skip
    folder = RunFolder(tmp_path)
    folder.completions.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([row]), folder.completion_table(1))
    answer = {
        "step": 1, "version": "1.1", "questions": 1, "index": 0, "reason": written,
        "columns": {"prompt": written, "solution": written}, "completions": [written],
        "rewards": [{written: 1.0}], "lengths": [3], "finish_reasons": ["stop"], "failures": [written],
    }  # fmt: skip
    folder.evaluations.write_text(json.dumps(answer) + "\n")
    for flags in ([], ["--difficulty"], ["--evaluations"]):
        assert execute_command(Penstock, "penstock", ["samples", str(tmp_path), *flags]) == 0
        printed = capfd.readouterr().out
        assert "a" in printed
        assert is_clean(printed)


def test_a_childs_line_stays_in_its_line(capsys):
    reports: list[Report] = []
    data = EVERYTHING.replace("\n", "").encode("utf-8", "surrogatepass")
    script = f"import sys; sys.stdout.buffer.write(b'\\x1b[31;1mred\\x1b[0m' + {data!r} + b'\\xff\\n')"
    child = Child(Service("actor", (sys.executable, "-c", script), 0), 1, reports.append)
    child.start({})
    wait_until(lambda: child.reap() is not None, "the child's end")
    printer = Printer(sys.stdout)
    for report in reports:
        printer(report)
    printed = capsys.readouterr().out
    assert is_clean(printed)
    assert "actor.1    | red\\x00" in printed
    assert all(line.startswith("actor.1    | ") for line in printed.splitlines())


def test_a_wrong_value_is_shown_harmlessly(hostile, monkeypatch, capfd):
    value = hostile.replace("\0", "").encode("utf-8", "replace").decode()
    monkeypatch.setenv("RUN_NAME", value)
    for arguments in (["status"], ["status", f"--{value}"], ["status", "--run.lease-s", value], [value]):
        assert execute_command(Queues, "queues", arguments) == 78
        assert is_clean(capfd.readouterr().err)


def test_an_error_that_ends_a_command_or_a_thread_is_shown_harmlessly():
    script = (
        "import threading\n"
        "from penstock.common.config.command import Command, execute_command\n"
        "def fail():\n"
        f"    raise RuntimeError('first ' + {EVERYTHING!r})\n"
        "class Fails(Command):\n"
        "    def execute(self):\n"
        "        thread = threading.Thread(target=fail)\n"
        "        thread.start()\n"
        "        thread.join()\n"
        "        fail()\n"
        "execute_command(Fails, 'fails')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count(b"RuntimeError: first") == 2
    assert is_clean(ended.stderr.decode())


QUEUES = [sys.executable, "-m", "penstock.common.queues"]


def test_watching_ends_when_the_reader_has_read_enough(busy: Run, run_name):  # noqa: F811
    command = [*QUEUES, "watch", "--run.name", run_name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:
        assert watch.stdout.readline().startswith(b"run ")
        watch.stdout.close()
        try:
            assert watch.wait(60) == 141
        finally:
            watch.kill()
        assert watch.stderr.read() == b""


@pytest.fixture
def unread():
    """A descriptor to a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    ("flags", "unbuffered"),
    [(["--help"], ""), (["status", "--dry-run"], ""), (["status", "--dry-run"], "1")],
)
def test_a_command_without_a_reader_ends_without_a_traceback(unread, flags, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        [*QUEUES, *flags],
        stdout=unread,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=300,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_broken_pipe_that_is_not_the_output_is_an_error():
    class Fails(Queues):
        """A command that loses another process."""

        def execute(self) -> int:
            raise BrokenPipeError("another pipe")

    with pytest.raises(BrokenPipeError, match="another pipe"):
        execute_command(Fails, "queues", ["status"])


def test_a_run_goes_on_when_nobody_reads_its_lines(unread):
    with os.fdopen(os.dup(unread), "w") as file:
        printer = Printer(file)
        for _ in range(2):
            printer(Report("actor.1", "output", "line"))


def test_an_error_of_the_server_is_shown_harmlessly(connection, sendable, capfd):
    script = b"return redis.error_reply('ERR ' .. ARGV[1])"

    class Fails(Queues):
        """A command whose request is refused in words that others chose."""

        def execute(self) -> int:
            return int(connection.execute("EVAL", script, 0, sendable))

    assert execute_command(Fails, "queues", ["status"]) == 69
    assert is_clean(capfd.readouterr().err)


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "_execute", interrupted)
    assert execute_command(Command, "penstock", []) == 130
    monkeypatch.setattr(console, "import_module", interrupted)  # as while modules are imported
    with pytest.raises(SystemExit, match="130"):
        console.penstock()
    assert capsys.readouterr().err == ""
