"""Writes into a live run by each user of `queues acl`: the table "Injections" of docs/security.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import structlog

from penstock.common.broker.acl import write_users
from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from penstock.common.errors import ConfigError, PenstockError, RunTaken, WrongType
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import ScoredGroup
from tests.helpers import NIGHTLY, AclUsers
from tests.learner.injected_run import KEYS, RUN, InjectedRun, Stage, honest
from tests.learner.injections import INJECTIONS

USERS = ("actor", "rewarder", "learner")
PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
HEAD = "| injection | actor's user | rewarder's user | learner's user |\n|---|---|---|---|\n"
TABLE = PAGE.partition(HEAD)[2].partition("\n\n")[0]
ROWS = {
    name: cells for name, *cells in re.findall(r"^\| (.+?) \| (.+) \| (.+) \| (.+) \|$", TABLE, re.M)
}
CASES = [
    (name, user, cell) for name, cells in ROWS.items() for user, cell in zip(USERS, cells, strict=True)
]


def is_due(name: str, user: str) -> bool:
    """Whether to make a case: of two workers' users who can do the same one, or both with NIGHTLY=1."""
    actor, rewarder, _ = ROWS[name]
    spared = USERS[list(ROWS).index(name) % 2]
    return actor != rewarder or user != spared or NIGHTLY


TAKEN = [case for case in CASES if case[2] != "refused" and is_due(case[0], case[1])]


@dataclass
class Seen:
    """What a cell says, or what a run showed."""

    ends: Counter[str] = field(default_factory=Counter)  # stale, dead and filtered tickets
    refused: Counter[str] = field(default_factory=Counter)
    deleted: dict[str, int] = field(default_factory=dict)
    restored: set[str] = field(default_factory=set)
    trained: bool = False
    exit_code: int = 0


def said(cell: str) -> Seen:
    """The claim of a cell, such as "dead; restored: open"."""
    seen = Seen()
    for part in cell.split("; "):
        kind, _, what = part.partition(": ")
        if kind == "stale":
            seen.ends["stale"] += 1
            seen.refused[what] += 1
        elif kind in ("dead", "filtered"):
            seen.ends[kind] += 1
        elif kind == "deleted":
            seen.deleted[what] = 1
        elif kind == "restored":
            seen.restored.add(what)
        elif kind == "exit code":
            seen.exit_code = int(what)
        else:
            assert kind in ("trained", "no effect"), f"unknown words in the table: {part}"
            seen.trained = kind == "trained"
    return seen


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AclUsers]:
    folder = tmp_path_factory.mktemp("injections")
    with LocalServer(folder) as server:
        operator = Connection(server.url, 10, 10)
        written, _ = write_users(operator, server.url, RUN, folder / "users")
        found = {user.role: Connection(user.file.read_text().strip(), 10, 10) for user in written}
        yield AclUsers(operator, **found)
        for connection in (operator, *found.values()):
            connection.close()


@pytest.fixture
def run(users: AclUsers, tmp_path: Path) -> InjectedRun:
    users.operator.execute("DEL", *KEYS.all)
    return InjectedRun(tmp_path / "run", users)


def go_on(run: InjectedRun, steps: int) -> Seen:
    """Train some steps from where the run is, and tell what was seen on the way."""
    began = 1 if run.payloads else 0
    try:
        for step in range(began, began + steps):
            if run.flow._weights is None or run.flow._weights.version.step < step:
                run.publish(step, evaluate=step == 0)
            run.train(step)
            run.beat()
            run.flow._check_server()
        run.settle()
    except PenstockError as error:
        return Seen(exit_code=error.exit_code)
    totals, _ = run.balance()
    seen = Seen(Counter({name: totals.get(name, 0) for name in ("stale", "dead", "filtered")}))
    seen.refused = run.refused + Counter(run.flow.intake.take_arrivals().refused)
    seen.ends = +seen.ends
    return seen


def restored(logs: list[Any]) -> set[str]:
    """What the learner said that it restored: names of keys, or "entries"."""
    found: set[str] = set()
    for line in logs:
        text = line["event"]
        if "the entries of open tickets" in text:
            found.add("entries")
        elif "Another client changed" in text or "WRONGTYPE" in text:
            found |= set(re.findall(r"penstock:\{injected\}:(\w+)", text))
    return found


def was_forged(run: InjectedRun) -> bool:
    """Whether a batch had a group that is not in every byte the workers' answer to what was issued."""
    for name, payload in run.payloads.items():
        first = decode(payload, ScoredGroup).group.ticket.version
        if payload != encode(honest(run.plan.source.train(name, first))):
            return True
    return False


def inject(run: InjectedRun, name: str, by: Connection, steps: int) -> Seen:
    """Make an injection and let the run go on; return what was seen."""
    stage, write = INJECTIONS[name]
    with structlog.testing.capture_logs() as logs:
        run.bring_to(stage)
        write(run, by)
        seen = go_on(run, steps)
    seen.restored = restored(logs) if not seen.exit_code else set()
    seen.deleted = RunView(run.connection, KEYS).malformed()
    seen.trained = was_forged(run)
    return seen


@pytest.mark.parametrize(
    ("name", "user", "cell"), TAKEN, ids=[f"{name}-{user}" for name, user, _ in TAKEN]
)
def test_what_a_user_can_do_with_an_injection(
    run: InjectedRun, users: AclUsers, name: str, user: str, cell: str
) -> None:
    thorough = user == "learner"  # the other users made the same writes
    assert inject(run, name, getattr(users, user), 2 if thorough else 1) == said(cell)
    if thorough:  # what the server holds now ends no later start
        following = InjectedRun(run.folder, users)
        following.publish(2)
        following.train(2)
        following.balance()
        assert not was_forged(following)


@pytest.mark.parametrize("stage", get_args(Stage))
def test_what_the_server_refuses_changes_nothing(
    run: InjectedRun, users: AclUsers, stage: Stage
) -> None:
    run.bring_to(stage)
    not_refused = []
    for name, user, cell in CASES:
        if cell == "refused" and INJECTIONS[name][0] == stage:
            try:
                INJECTIONS[name][1](run, getattr(users, user))
            except (ConfigError, RunTaken, WrongType):
                continue
            not_refused.append((name, user))
    assert not_refused == []
    assert go_on(run, 2) == Seen()
    assert not was_forged(run)
    assert RunView(run.connection, KEYS).malformed() == {}


def test_the_page_has_each_injection_once() -> None:
    assert list(ROWS) == list(INJECTIONS)
    assert len(ROWS) >= 40
