"""Runs from Python: execute, watch, read and replay them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import started_server
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings, Section
from penstock.common.config.variables import section_variables
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.reading import reading
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal import segments
from penstock.common.journal.claims import Position, read_chain, read_claims
from penstock.common.monitor.snapshot import Audit, RunStatus, read_audit, read_status
from penstock.common.wire.codec import decode
from penstock.common.wire.messages import ScoredGroup, Verdict

if TYPE_CHECKING:
    from penstock.learner.replay import Replayed

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended: the exit code (docs/operations.md has a table), and the run's folder."""

    exit_code: int
    folder: Path


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One record of a journal: its kind, its fields, and the position after it.

    The kinds and their fields are listed in learner/state/journal.py. The fields `groups` and `filtered`
    of a batch hold decoded messages.
    """

    kind: str
    position: Position
    fields: Mapping[str, Any]

    @property
    def groups(self) -> tuple[ScoredGroup, ...]:
        """The groups of a batch in the order in which they were trained; empty for other kinds."""
        return tuple(self.fields.get("groups", ()))


def run(
    run: RunSettings,
    learner: LearnerSettings,
    actor: ActorSettings | None = None,
    rewarder: RewarderSettings | None = None,
    *,
    redis_url: str = "",
    actors: int = 1,
    rewarders: int = 1,
    procfile: Path | None = None,
    output: Path | None = None,
) -> RunResult:
    """Execute a run with `penstock up` in a child process, and return when the run has ended.

    A section that is None comes from the environment, and so does REDIS_URL if `redis_url` is "";
    without a REDIS_URL the run starts a queue server of its own. `actors` and `rewarders` are numbers of
    processes. `procfile` None is ./Procfile, or the one that comes with Penstock. `output` is the file
    to which log lines are appended; None prints them.

    Ctrl-C is passed on: the run ends in order, a second Ctrl-C ends the run at once, and then
    KeyboardInterrupt is raised. A run that fails raises nothing: see the result's exit code. Raise
    OSError if `output` cannot be opened.
    """
    sections: dict[str, Section | None] = {
        "RUN": run, "LEARNER": learner, "ACTOR": actor, "REWARDER": rewarder,
    }  # fmt: skip
    environment = {**os.environ, **_variables(sections)}
    if redis_url:
        environment["REDIS_URL"] = redis_url
        environment.pop("REDIS_URL_FILE", None)
    command = [sys.executable, "-P", "-m", "penstock.deploy", "up"]
    command += ["--actors", str(actors), "--rewarders", str(rewarders)]
    command += ["--procfile", str(procfile)] if procfile else []
    with _opened(output, run.umask) as file:
        # A session of its own: a terminal's Ctrl-C reaches the run once, from here, and not twice.
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT if file else None,
            start_new_session=True,
        )
        return RunResult(_wait(child), run.folder.path)


def _variables(sections: Mapping[str, Section | None]) -> dict[str, str]:
    """Return the environment variables that give the roles these settings, unset fields included.

    `sections` are by prefix, such as "RUN"; a section that is None gives no variable.
    """
    return {
        variable: text
        for prefix, section in sections.items()
        if section is not None
        for variable, text in section_variables(prefix, section).items()
    }


@contextmanager
def _opened(path: Path | None, umask: str) -> Iterator[int | None]:
    """Give the descriptor of the file `path`, opened for appending; None without a path. Raise OSError.

    A new file obeys `umask`, octal, too, whatever the umask of the calling process is. The file is
    closed after the block.
    """
    if path is None:
        yield None
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666 & ~int(umask, 8))
    try:
        yield file
    finally:
        os.close(file)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child and return its exit code, as a shell reports it: 137 if signal 9 killed it.

    An exception, KeyboardInterrupt above all, ends the child in order and is then raised again.
    """
    try:
        code = child.wait()
    except BaseException:
        _end(child)
        raise
    return code if code >= 0 else 128 - code


def _end(child: subprocess.Popen[bytes]) -> None:
    """Send SIGINT and wait until the child has ended; each Ctrl-C meanwhile sends SIGINT again.

    A child that has ended already gets no signal.
    """
    while child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait()
        except KeyboardInterrupt:
            continue


def status(run: RunSettings | str, redis_url: str = "") -> RunStatus:
    """Return what a run does now: streams, consumers, credit, totals.

    `run` as a text is the name of a run below runs/. If `redis_url` is "", the queue server is the one
    that `penstock up` started for the run. Raise ValueError if the text is no name, ConfigError if no
    server is known or usable, MalformedMessage for another release's run, ServerUnavailable if the
    server does not answer, RunNotReady if there is no such run on the server.
    """
    return _ask(run, redis_url, read_status)


def audit(run: RunSettings | str, redis_url: str = "") -> Audit:
    """Return what became of every ticket of a run; `faults` is empty if every ticket is accounted for.

    `run` and `redis_url` are those of `status`. Raise ConfigError if no server is known,
    ServerUnavailable if it does not answer, RunNotReady without the run, and the other errors of
    `status`.
    """
    return _ask(run, redis_url, read_audit)


def _ask(run: RunSettings | str, redis_url: str, read: Callable[[Connection, str], Found]) -> Found:
    """Return what `read` returns, given a connection to a run's queue server and the run's name.

    `run` and `redis_url` are those of `status`. The connection is closed afterwards. Raise the errors of
    `read`, ValueError if a text is no run's name, ConfigError if no server is known or it cannot be
    used, ServerUnavailable if it does not answer.
    """
    settings = RunSettings(name=run) if isinstance(run, str) else run
    limit_s = settings.connect_timeout_s
    url = redis_url or started_server(settings.folder)
    connection = Connection(url, limit_s, limit_s, allow_open=settings.allow_open_server)
    try:
        return read(connection, settings.name)
    finally:
        connection.close()


def read_journal(run_folder: Path | str) -> Iterator[JournalRecord]:
    """Yield the records of the run in the folder `run_folder` in order, over all starts of the learner.

    A run may be read while it goes on: the last record, if half written, is left out. Raise ConfigError
    if there is no journal, or if records are missing, damaged, or of another release.
    """
    folder = RunFolder(Path(run_folder))
    claims = read_claims(folder)
    if not claims:
        raise ConfigError(f"{run_folder}: no journal of a run there; expected journal/ and claims/")
    newest = max(claims)
    for position, record in read_chain(folder, claims[newest]):
        yield _decoded(folder, position, record)
    end = 0
    for end, record in segments.read_journal(folder, newest):
        yield _decoded(folder, Position(newest, end), record)
    rest = segments.left_out(folder, newest, end)
    if rest is not None and not rest.torn:
        raise ConfigError(segments.explain_gap(folder, newest, end, end + rest.length))


def _decoded(folder: RunFolder, position: Position, record: Mapping[str, Any]) -> JournalRecord:
    """Return a journal's record with the messages in `groups` and `filtered` decoded.

    `position` is the one after the record, in the run's `folder`. Raise ConfigError, which names both,
    for a message or record that is damaged.
    """
    fields = {name: value for name, value in record.items() if name != "kind"}
    with reading(f"{folder.journal}, {position}", segments.REMEDY):
        for name, kind in (("groups", ScoredGroup), ("filtered", Verdict)):
            if name in fields:
                fields[name] = [decode(message, kind) for message in fields[name]]
        return JournalRecord(record["kind"], position, fields)


def replay(run_folder: Path | str, out: Path | str | None = None, **changes: object) -> "Replayed":
    """Train a run again from its journal alone, in a child process, and return how the two compare.

    Model and metrics go to `out`, by default RUN_FOLDER/replay. `changes` are learner settings to
    change: `loss_type="gspo"`. Raise the error that ended the child: ConfigError if there is no journal
    or a setting is wrong, PenstockError itself for an unknown exit code.
    """
    from penstock.learner.replay import Replayed

    where = [str(run_folder), str(out or RunFolder(Path(run_folder)).replay)]
    command = [sys.executable, "-P", "-m", "penstock.learner.replay", *where, json.dumps(changes)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        kinds = (kind for kind in PenstockError.__subclasses__() if kind.exit_code == answer.returncode)
        kind = next(kinds, PenstockError)
        raise kind(answer.stderr.rpartition(f": {kind.__name__}: ")[2].strip())
    return Replayed(**json.loads(answer.stdout.splitlines()[-1]))
