"""The `queues` command: read a run's queues from any machine, audit its tickets, discard it."""

import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field, field_validator, model_validator
from pydantic_settings import CliPositionalArg, CliSubCommand, CliToggleFlag
from rich.console import Console
from rich.live import Live

from penstock.common.broker.acl import default_folder, write_users
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import delete_data, started_server
from penstock.common.broker.scale import MOST, Scale
from penstock.common.config.command import (
    CommandGroup,
    Result,
    ResultCommand,
    escape_missing_characters,
    execute_command,
)
from penstock.common.config.redis_url import parse_host
from penstock.common.config.role_command import RunCommand
from penstock.common.errors import CommandRefused, ConfigError, RunNotReady, ServerUnavailable
from penstock.common.files.reading import absence
from penstock.common.files.run_folder import RunPath
from penstock.common.journal.audit import JournalAudit, audit_journal
from penstock.common.log import log_errors_alone
from penstock.common.monitor.limit import LimitWatch
from penstock.common.monitor.overview import Overview, read_overview
from penstock.common.monitor.screen import render
from penstock.common.monitor.snapshot import discard_run, read_audit, read_dead, read_status
from penstock.common.monitor.status_text import (
    dead_rows,
    format_audit,
    format_dead,
    format_overview,
    format_status,
)
from penstock.common.monitor.watch import PeriodicOverview, RunWatch, progress_line
from penstock.common.role import stop_on_signals
from penstock.common.text import one_line, short

_WATCH_EVERY_S = 2.0
_DEAD_SHOWN = 1000


class QueueCommand(RunCommand, ResultCommand):
    """Base of the commands that ask a run's queue server."""

    role = "queues"
    folder: CliPositionalArg[RunPath | None] = Field(
        None, description="the run's folder, such as runs/first; else RUN_NAME says which"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_folder(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values` by field, with the run's name and place from `folder`, if that is given."""
        if folder := values.get("folder"):
            path = Path(folder).absolute()
            values = values | {"run": {**values.get("run", {}), "name": path.name, "dir": path.parent}}
        return values

    def work(self) -> int:
        """Connect to REDIS_URL, or to the server of `penstock up`, call `ask`, return its exit code.

        Raise ConfigError for no server or one that cannot be used, ServerUnavailable if the server, now
        or at a later command, does not answer within RUN_CONNECT_TIMEOUT_S, or what `ask` raises.
        """
        return self.ask(self.connect())

    def connect(self) -> Connection:
        """Return a connection to REDIS_URL, or to the server of `penstock up`. Raise as `work`."""
        limit_s = self.run.connect_timeout_s
        url = self.redis_url or started_server(self.run.folder)
        return Connection(url, limit_s, limit_s, allow_open=self.run.allow_open_server)

    def ask(self, connection: Connection) -> int:
        """Print the result of `read`, with --json as lines of JSON, and return the result's exit code.

        `connection` is to the run's queue server. Raise what `read` raises.
        """
        return self.show(self.read(connection))

    def read(self, connection: Connection) -> Result:
        """Return what the command prints about the run: a text, the objects for --json, the exit code.

        Abstract here: a subclass asks the server by `connection`, and may raise RunNotReady.
        """
        raise NotImplementedError


class Status(QueueCommand):
    """Print step, reward, what limits the run, its processes, and its streams with their tickets.

    A stream's depth counts its entries; those held are being worked on, the others wait.
    """

    def read(self, connection: Connection) -> Result:
        """Return the status of the run as text and as one object, exit code 0.

        Raise RunNotReady without the run, MalformedMessage if the run's contract cannot be read.
        """
        name, folder = self.run.name, str(self.run.folder.path)
        now, found = read_overview(connection, name, folder), read_status(connection, name)
        sentence = LimitWatch().describe(now)
        row = asdict(found) | overview_row(now, sentence)
        return Result(f"{format_overview(now, sentence)}\n\n{format_status(found)}", [row])


class Watch(QueueCommand):
    """Show step, reward, what limits the run and its processes, until the run's end.

    Ctrl-C ends the watching alone. Without a terminal, or with --json, each look is printed.
    """

    def ask(self, connection: Connection) -> int:
        """Show the run every two seconds; return 0 at its end, or on Ctrl-C, SIGTERM and SIGHUP.

        Raise RunNotReady without the run, ServerUnavailable or another error of Connection.execute for
        the first look; later ones are shown. Raise BrokenPipeError if standard output was closed.
        """
        read_overview(connection, self.run.name)
        log_errors_alone()
        connection.close()
        watch = RunWatch(self.connect, self.run.name, str(self.run.folder.path))
        console = Console()
        escape_missing_characters(console.file)
        live = console.is_terminal and not console.is_dumb_terminal and not self.as_json
        show = partial(self._on_screen, console=console) if live else self._as_text
        stopping = stop_on_signals()
        with PeriodicOverview(watch) as looks:
            looks.wait()
            show(looks, stopping)
        return 0

    def _on_screen(self, looks: PeriodicOverview, stopping: threading.Event, console: Console) -> None:
        """Show the live screen on the terminal of `console` until the run has ended or `stopping`."""
        now, sentence = looks.latest()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for now, sentence in self._each(looks, stopping):
                live.update(render(now, sentence, (), *console.size, console.encoding), refresh=True)
        print(one_line(progress_line(now, sentence)))

    def _as_text(self, looks: PeriodicOverview, stopping: threading.Event) -> None:
        """Print each look, with --json as a line of JSON, until the run has ended or `stopping`."""
        for now, sentence in self._each(looks, stopping):
            text = format_overview(now, sentence) if now else sentence
            self.show(Result(text, [overview_row(now, sentence)]))

    def _each(
        self, looks: PeriodicOverview, stopping: threading.Event
    ) -> Iterator[tuple[Overview | None, str]]:
        """Yield the newest look every two seconds, until the run has ended or `stopping`.

        `penstock up` may stop its server between two looks. After a run's last step that is the end.
        """
        before: Overview | None = None
        while not stopping.is_set():
            now, sentence = looks.latest()
            if now is None and before and self._made_all_steps(before):
                now, sentence = replace(before, state="ended"), "The run has ended."
            yield now, sentence
            if now and now.state == "ended":
                return
            before = now or before
            stopping.wait(_WATCH_EVERY_S)

    def _made_all_steps(self, before: Overview) -> bool:
        """Return whether a run with a server of its own, last seen as `before`, made its last step."""
        made = before.progress
        complete = made is not None and made.step >= made.steps
        return complete and not self.redis_url and self.run.folder.results("train").is_file()


def overview_row(now: Overview | None, sentence: str) -> dict[str, object]:
    """Return the object for --json of an overview: the `limit`, and all but the streams."""
    if now is None:
        return {"limit": sentence}
    row = asdict(now)
    del row["streams"], row["server"]
    return {**row, "limit": sentence}


class JournalCommand(QueueCommand):
    """Base of the commands that ask the journal in the run's folder when the queue server is gone."""

    def work(self) -> int:
        """Ask the queue server, or the journal if the server is gone; return the exit code.

        Raise the server's error if there is no journal, ConfigError for a damaged one.
        """
        try:
            return super().work()
        except (ConfigError, RunNotReady, ServerUnavailable) as error:
            folder = self.run.folder
            if not folder.path.exists() and not self.redis_url:
                raise ConfigError(f"{folder.path}: {absence(folder.path)}; {error}") from error
            if not folder.journal.is_dir():
                raise
            told = self.by_journal(audit_journal(self.run.folder))
            why = "it ended with the run, or runs on another machine"
            if self.redis_url or not isinstance(error, ServerUnavailable):
                why = short(re.split(r"; |\. ", str(error))[0])
        head = f"No queue server tells ({why}). The journal in {self.run.folder.path} says:"
        return self.show(Result(f"{head}\n{told.text}", told.rows, told.exit_code))

    def by_journal(self, found: JournalAudit) -> Result:
        """Return what the command prints by the journal's audit. Abstract here."""
        raise NotImplementedError


class Audit(JournalCommand):
    """Check that every ticket issued has ended or is in flight. The exit code is 1 if not.

    If the queue server is gone, as after the run's end, the journal in the run's folder is asked.
    """

    tickets: CliToggleFlag[bool] = Field(
        False, description="list all open tickets, not only each holder's oldest"
    )

    def read(self, connection: Connection) -> Result:
        """Return the audit of the run as text and as one object; the exit code is 1 for faults, else 0.

        A fault is an open ticket whose entry is gone, or a number of issued tickets that is not that of
        the ended and open ones. The object has them under "faults". Raise RunNotReady without the run.
        """
        found = read_audit(connection, self.run.name)
        row = asdict(found) | {"faults": found.faults}
        return Result(format_audit(found, self.tickets), [row], 1 if found.faults else 0)

    def by_journal(self, found: JournalAudit) -> Result:
        """Return a journal's audit as text and as one object; the exit code is 1 for faults, else 0."""
        lines = [f"run {self.run.name}: {found.issued} tickets issued, {found.steps} steps"]
        lines += [f"  {state:<10}{count:>8}" for state, count in sorted(found.ended.items())]
        faults = found.faults()
        balance = f"balances: {found.issued} = {found.ended.total()} ended + {found.open} open"
        row = {"run": self.run.name, "issued": found.issued, "ended": found.ended, "open": found.open}
        text = "\n".join([*lines, f"  open      {found.open:>8}", *(faults or [balance])])
        return Result(text, [row | {"faults": faults}], 1 if faults else 0)


class Dead(JournalCommand):
    """Print the newest tickets that failed too often, by reason.

    None is put back: a question comes again in the next epoch. Without its server the journal is asked.
    """

    drop: CliToggleFlag[bool] = Field(
        False, description="empty the list afterwards; the journal keeps what became of each ticket"
    )

    def read(self, connection: Connection) -> Result:
        """Return the newest 1,000 dead tickets, with --drop for the last time. The exit code is 0.

        The text has a line per reason, the newest first, or is "none". The objects have "ticket" and
        "reason", newest first. Raise RunNotReady if the run is not on the server.
        """
        found = read_dead(connection, self.run.name, _DEAD_SHOWN)
        text = format_dead(found)
        if self.drop:
            connection.execute("DEL", Keys(self.run.name).dead)
        return Result(text, dead_rows(found))

    def by_journal(self, found: JournalAudit) -> Result:
        """Return the dead tickets of a journal as `read` does. Raise ConfigError with --drop."""
        if self.drop:
            raise ConfigError("--drop: there is no list without the queue server; leave --drop out")
        dead = list(reversed(found.dead))
        return Result(format_dead(dead), dead_rows(dead))


class Discard(QueueCommand):
    """Delete all keys of the run from the queue server. The run's folder stays.

    If that is the server of `penstock up`, and has ended, its data in the run's folder are deleted.
    """

    yes: CliToggleFlag[bool] = Field(False, description="confirm: work in flight is deleted too")

    def work(self) -> int:
        """Ask the server, or delete the data of the run's own server that has ended; return the code.

        Raise ConfigError without --yes, RunTaken if a `penstock up` of the run goes on, and what the
        base raises.
        """
        try:
            return super().work()
        except ServerUnavailable as error:
            if self.redis_url or isinstance(error, CommandRefused):
                raise
        self._check_yes("its own queue server, which has ended")
        data = delete_data(self.run.folder)
        text = f"The queue server of run {self.run.name} has ended: its data {data} are deleted"
        return self.show(Result(text, [{"run": self.run.name, "deleted": str(data)}]))

    def _check_yes(self, server: str) -> None:
        """Raise ConfigError if --yes is not given."""
        if not self.yes:
            raise ConfigError(
                f"this deletes all of run {self.run.name} on {server}, work in flight included; the "
                "learner's folder stays: repeat the command with --yes to delete"
            )

    def read(self, connection: Connection) -> Result:
        """Delete all keys of the run on the server and return how many there were, 0 without such a run.

        The object has "run", "server" and "keys_deleted"; the exit code is 0. Other runs and the run's
        folder stay. Raise ConfigError, with nothing deleted, if --yes is not given.
        """
        run, server = self.run.name, connection.address
        self._check_yes(server)
        row = {"run": run, "server": server, "keys_deleted": discard_run(connection, run)}
        return Result(f"{row['keys_deleted']} keys of run {run} deleted on {server}", [row])


class Acl(QueueCommand):
    """Write a user per role to the queue server, and a file with the URL of each. For an operator.

    The users may do what their roles need, on the keys of this run alone. Users whose files exist keep
    their passwords. The server's functions are loaded too, which the users may not do.
    """

    out: Path | None = Field(None, description="folder for the files; by default queue/users of the run")

    def ask(self, connection: Connection) -> int:
        """Write a user to the server and a file with its URL for each role, print the paths, return 0.

        The roles are learner, actor, rewarder and reader. The server's functions are loaded before. The
        files are in `out`, by default queue/users of the run's folder. A line warns if the server has
        not stored its users and forgets them when it ends. Raise ConfigError without the rights of an
        operator, or if an old file there is malformed.
        """
        url = self.redis_url or started_server(self.run.folder)
        folder = self.out or default_folder(self.run.folder)
        users, saved = write_users(connection, url, self.run.name, folder)
        lines = [f"{user.role:<10}REDIS_URL_FILE={user.file}" for user in users]
        if not saved:
            lines.append(
                f"The server {connection.address} has no aclfile, or cannot write it, and forgets its "
                "users when it ends: run this command again after each start of the server."
            )
        rows = [{"role": user.role, "user": user.name, "file": str(user.file)} for user in users]
        return self.show(Result("\n".join(lines), rows))


class Export(QueueCommand):
    """Serve the run's state to Prometheus, at http://HOST:PORT/metrics, until Ctrl-C.

    Nobody is asked for a password there: names of processes and figures are all that is told.
    """

    listen: str = Field("127.0.0.1:9400", description="HOST:PORT where Prometheus asks")

    def ask(self, connection: Connection) -> int:
        """Serve until Ctrl-C or SIGTERM, then return 0.

        Raise ConfigError for an address that cannot be used.
        """
        from penstock.common.monitor.export import serve

        stopping = stop_on_signals()
        host, port = parse_host(self.listen, "--listen")
        with PeriodicOverview(RunWatch(self.connect, self.run.name)) as looks:
            port, _ = serve(looks, self.run.name, host, port)
            print(f"Prometheus finds run {self.run.name} at {host}:{port}/metrics.", flush=True)
            stopping.wait()
        return 0


class ScaleRoles(QueueCommand):
    """Print what each `penstock up` of the run runs; `queues scale actor=3` changes it, while it runs.

    Missing processes are started, and the newest ones above the count finish their work and end.
    """

    requests: CliPositionalArg[list[str]] = Field([], description="ROLE=COUNT, such as actor=3")
    host: str = Field("", description="host or name of the `penstock up`, if there are several")

    @model_validator(mode="before")
    @classmethod
    def _without_folder(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values` with a first word such as actor=3 among the requests: it is no folder."""
        if "=" in (first := str(values.get("folder") or "")):
            return {**values, "folder": None, "requests": [first, *values.get("requests", [])]}
        return values

    @field_validator("requests")
    @classmethod
    def _are_counts(cls, requests: list[str]) -> list[str]:
        """Return `requests`. Raise ValueError unless each is a role, `=` and a count of at most MOST."""
        for request in requests:
            if not re.fullmatch(r"[\w-]+=[0-9]{1,4}", request):
                raise ValueError(f"expected ROLE=COUNT, such as actor=3, found {request}")
            if int(request.partition("=")[2]) > MOST:
                raise ValueError(f"expected at most {MOST} processes of a role, found {request}")
        return requests

    def read(self, connection: Connection) -> Result:
        """Write the requests; return what each `penstock up` runs, and is asked for, as text and rows.

        Raise ConfigError for a role that none or several run; see Scale.choose.
        """
        scale = Scale(connection, Keys(self.run.name))
        wanted = [(role, int(count)) for role, count in (one.split("=") for one in self.requests)]
        names = [scale.choose(self.host, role) for role, _ in wanted]  # all before the first is written
        for name, (role, count) in zip(names, wanted, strict=True):
            scale.request(name, role, count)
        rows, lines = [], []
        for name, status in scale.running().items():
            asked, processes = scale.requests(name), status.processes
            rows.append({"name": name, "host": status.host, "processes": processes, "asked": asked})
            shown = (
                f"{role} {count}{f' ({asked[role]} asked for)' if role in asked else ''}"
                for role, count in processes.items()
            )
            lines.append(f"{name}: {', '.join(shown)}")
        return Result("\n".join(lines) or f"No `penstock up` of run {self.run.name} runs.", rows)


class Queues(CommandGroup):
    """Read a run's queues from any machine, audit its tickets, discard it.

    The run is named by --run.name or RUN_NAME, its server by --redis-url or REDIS_URL.
    """

    status: CliSubCommand[Status] = Field(description="step, reward, limit, processes, streams, totals")
    audit: CliSubCommand[Audit] = Field(description="check that every ticket ended or is in flight")
    watch: CliSubCommand[Watch] = Field(description="step, reward, limit and processes, live")
    dead: CliSubCommand[Dead] = Field(description="the newest tickets that failed too often, and why")
    export: CliSubCommand[Export] = Field(description="serve the run's state to Prometheus")
    acl: CliSubCommand[Acl] = Field(description="write a user per role, with what the role needs")
    scale: CliSubCommand[ScaleRoles] = Field(
        description="how many actors run where, and how many should"
    )
    discard: CliSubCommand[Discard] = Field(description="delete the run's keys from the server")


def main() -> NoReturn:
    """Run the `queues` command and exit with its code."""
    sys.exit(execute_command(Queues, "queues"))


if __name__ == "__main__":
    main()
