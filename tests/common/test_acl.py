"""What the users of a run's roles can and cannot do: the table of docs/security.md on a real server."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import redis

from penstock.common.broker.acl import ROLES, Role, _saved, rules, user_name
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.config.command import execute_command
from penstock.common.config.redis_url import parse_url
from penstock.common.errors import ConfigError, NotPermitted, ServerUnavailable
from penstock.common.monitor.snapshot import read_audit, read_dead, read_status
from penstock.common.monitor.waiting import describe_waiting
from penstock.common.queues import Queues
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Weights
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.builders import V0, Run
from tests.helpers import AclUsers

PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (yes|no) \| (yes|no) \| (yes|no) \| (yes|no) \|$", PAGE, re.MULTILINE)
RUN = "table"
KEYS = Keys(RUN)
REFUSED = re.compile("no permissions|can't run this command|ACL failure in script|command not allowed")


class Table:
    """A server with the users of a run, and the run in the same state before each command."""

    def __init__(self, server: LocalServer) -> None:
        self.operator = redis.Redis.from_url(server.url.partition("?")[0])
        self._path = parse_url(server.url).path
        self._connection = Connection(server.url, 10, 10)
        for role in ROLES:
            grants = ["reset", "on", ">password", "resetchannels", "-@all", *rules(role, KEYS)]
            self._connection.execute("ACL", "SETUSER", user_name(RUN, role), *grants)
        self.clients = {
            role: redis.Redis(
                unix_socket_path=self._path, username=user_name(RUN, role), password="password"
            )
            for role in ROLES
        }
        self.clients["default"] = self.operator

    def allows(self, user: str, command: str) -> bool:
        """Whether the server takes the command from the user, whatever comes of it."""
        names = {key.rpartition(":")[2]: key for key in KEYS.all}
        arguments = arguments_of(command, names, self._play())
        try:
            self.clients[user].execute_command(*arguments)
        except redis.exceptions.ResponseError as error:
            refused = isinstance(error, redis.exceptions.NoPermissionError) or REFUSED.search(str(error))
            return not refused
        return True

    def _play(self) -> dict[str, str]:
        """Bring the run into its state: train:1 held by `actor`, train:2 by `rewarder`: entries."""
        self.operator.delete(*KEYS.all)
        run = Run(self._connection, KEYS)
        run.issue(1, 2)
        actor, rewarder = run.actor(), run.rewarder()
        held, moved = actor.take(2)
        actor.handoff(moved, KEYS.rollouts, b"group")
        (group,) = rewarder.take(1)
        return {"HELD": held.id, "GROUP": group.id, "SERVER": self._connection.server_id}


def arguments_of(command: str, names: dict[str, str], entries: dict[str, str]) -> list[str]:
    """The words of a command of the table, with keys, function and entries as the server knows them."""
    words = command.split()
    if words[0] in ("FCALL", "FCALL_RO"):
        keys = words[words.index("KEYS") + 1 : words.index("ARGS") if "ARGS" in words else None]
        args = words[words.index("ARGS") + 1 :] if "ARGS" in words else []
        found = [entries.get(word, word) for word in args]
        return [
            words[0],
            f"penstock_4_{words[1]}",
            str(len(keys)),
            *(names[key] for key in keys),
            *found,
        ]
    other = {word: "penstock:{other}:" + word[6:] for word in words if word.startswith("other:")}
    return [words[0], *((names | other).get(word, word) for word in words[1:])]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with LocalServer(tmp_path_factory.mktemp("acl")) as server:
        yield Table(server)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_user_can_do_what_the_page_says_and_no_more(table: Table, row: tuple[str, ...]) -> None:
    command, *expected = row
    found = ["yes" if table.allows(role, command) else "no" for role in ROLES]
    assert found == expected


def test_the_page_has_all_rows_and_the_users_in_order() -> None:
    assert len(ROWS) >= 150
    assert "| command | learner | actor | rewarder | reader |" in PAGE
    assert ROLES == ("learner", "actor", "rewarder", "reader")


def test_the_run_of_the_table_is_one_in_which_the_functions_write(table: Table) -> None:
    """The rows of functions say something: called by the operator, the same calls change the run."""
    calls = [row[0] for row in ROWS if row[0].startswith("FCALL ") and row[2] == "no" and row[3] == "no"]
    assert len(calls) > 10
    for call in calls:
        assert table.allows("default", call), call


def test_the_learner_may_send_every_command_of_the_functions() -> None:
    """A command that is new in functions.lua must be allowed to those who call it."""
    source = files("penstock.common.broker").joinpath("functions.lua").read_text()
    sent = {
        "|".join(filter(None, found)).lower()
        for found in re.findall(r"redis\.p?call\('([A-Z]+)'(?:, '([A-Z]+)')?", source)
    }
    sent = {
        name if name.partition("|")[0] in ("xgroup", "xinfo") else name.partition("|")[0]
        for name in sent
    }
    allowed = {rule[1:] for rule in rules("learner", KEYS) if rule.startswith("+")}
    assert len(sent) > 10
    assert sent - allowed == set()


# A whole run under the users


def test_a_run_goes_from_claim_to_end_under_the_users(acl_users: AclUsers, keys: Keys) -> None:
    learner = LearnerQueue(acl_users.learner, keys, 1)
    learner.claim("nonce", "me", 30.0)
    learner.publish_contract(b"contract")
    learner.announce(Weights(V0, "path", "hash", ""))
    learner.set_state("running")
    learner.beat(30.0, "busy")
    learner.issue("train", [(TicketId.train(n), V0, b"ask") for n in range(5)])
    actor = WorkStream(acl_users.actor, keys, keys.tickets, "actor", 30.0, 2)
    rewarder = WorkStream(acl_users.rewarder, keys, keys.rollouts, "rewarder", 30.0, 2)
    first, second, third, fourth, fifth = actor.take(5)
    assert actor.renew([first.id]) == [True]
    assert actor.mark_alone(first)
    assert actor.handoff(first, keys.rollouts, b"group")
    assert actor.handoff(second, keys.rollouts, b"group")
    assert actor.bury(third, "train", "why")
    assert actor.give_back(fourth)
    assert not actor.fail(fifth, "train", "why")
    actor.reclaim(9)
    actor.leave()
    good, bad = rewarder.take(2)
    assert rewarder.handoff(good, keys.scored, b"scored")
    assert rewarder.bury(bad, "train", "why")
    rewarder.reclaim(9)
    rewarder.leave()
    for user in (acl_users.actor, acl_users.rewarder):
        view = RunView(user, keys)
        assert view.learner().phase == "busy"
        assert not view.ended()
        assert "ticket" in describe_waiting(user, keys, 30.0)
    outcomes = learner.outcomes("train", "0-0", 9)
    assert len(outcomes) == 3
    assert learner.close("train", {outcome.ticket: "trained" for outcome in outcomes}) == 3
    learner.set_totals({"issued": 5, "trained": 3})


def test_the_reader_reads_a_run(acl_users: AclUsers, keys: Keys, run_name: str) -> None:
    run = Run(acl_users.learner, keys)
    run.issue(1, 2)
    actor = run.actor(connection=acl_users.actor)
    (entry,) = actor.take(1)
    actor.bury(entry, "train", "why")
    assert read_status(acl_users.reader, run_name).open == 2
    assert not read_audit(acl_users.reader, run_name).faults
    assert read_dead(acl_users.reader, run_name, 5) == [("train:1", "why")]


def test_a_learner_without_the_operators_functions_says_who_loads_them(
    acl_users: AclUsers, keys: Keys
) -> None:
    LearnerQueue(acl_users.learner, keys, 1).claim("nonce", "me")
    acl_users.operator.execute("FUNCTION", "FLUSH")
    with pytest.raises(ConfigError, match=r"lacks this release's functions.*`queues acl`"):
        LearnerQueue(acl_users.learner, keys, 2).claim("nonce", "me")


def test_a_role_with_another_roles_user_says_what_to_set(acl_users: AclUsers, keys: Keys) -> None:
    with pytest.raises(NotPermitted, match="Set REDIS_URL to the URL of this role's user"):
        LearnerQueue(acl_users.actor, keys, 1).claim("nonce", "me")
    Run(acl_users.learner, keys)
    with pytest.raises(NotPermitted, match="refuses this user"):
        acl_users.actor.call("claim", [keys.fence], ["nonce", 9, "me", 0])
    assert RunView(acl_users.reader, keys).incarnation() == 1


# The command


@pytest.fixture
def command(
    private_server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    monkeypatch.setenv("REDIS_URL", private_server.url)
    monkeypatch.setenv("RUN_NAME", "mine")
    return private_server.url, tmp_path / "out"


def test_the_command_writes_a_file_per_role_and_prints_no_password(
    command: tuple[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    url, out = command
    assert execute_command(Queues, "queues", ["acl", "--out", str(out)]) == 0
    said = capfd.readouterr()
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{role}.url" for role in ROLES)
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    for role in ROLES:
        file = out / f"{role}.url"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        address = parse_url(file.read_text().strip())
        assert address.username == f"penstock-mine-{role}"
        assert address.path == parse_url(url).path
        assert address.password is not None
        assert address.password not in said.out + said.err
        assert f"REDIS_URL_FILE={file}" in said.out
    assert "forgets" not in said.out


def test_users_keep_their_passwords_when_the_command_is_repeated(command: tuple[str, Path]) -> None:
    _, out = command
    found = []
    for _ in range(2):
        assert execute_command(Queues, "queues", ["acl", "--out", str(out)]) == 0
        found.append({path.name: path.read_text() for path in out.iterdir()})
    assert found[0] == found[1]
    assert Connection((out / "actor.url").read_text().strip(), 10, 10).execute("PING")


def test_a_user_is_written_anew_without_earlier_rights(
    command: tuple[str, Path], private_server: LocalServer
) -> None:
    _, out = command
    operator = Connection(private_server.url, 10, 10)
    operator.execute(
        "ACL", "SETUSER", "penstock-mine-actor", "on", "nopass", "~*", "+@all", "(+@all ~*)"
    )
    assert execute_command(Queues, "queues", ["acl", "--out", str(out)]) == 0
    actor = Connection((out / "actor.url").read_text().strip(), 10, 10)
    with pytest.raises(NotPermitted):
        actor.execute("SET", "unrelated", "x")


def test_a_damaged_file_is_named(command: tuple[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    _, out = command
    out.mkdir()
    (out / "actor.url").write_text("redis://:s3cr3t@host/zero\n")
    assert execute_command(Queues, "queues", ["acl", "--out", str(out)]) == 78
    said = capfd.readouterr().err
    assert f"{out / 'actor.url'}: " in said
    assert "s3cr3t" not in said


def test_users_that_the_server_did_not_store_are_told(private_server: LocalServer) -> None:
    connection = Connection(private_server.url, 10, 0.5)
    assert _saved(connection)
    folder = Path(connection.execute("CONFIG", "GET", "aclfile")[b"aclfile"].decode()).parent
    away = folder.rename(folder.with_name("away"))
    assert not _saved(connection)
    away.rename(folder)
    private_server.kill()
    with pytest.raises(ServerUnavailable, match="did not answer"):
        _saved(connection)


def test_only_an_operator_writes_users(
    command: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, out = command
    assert execute_command(Queues, "queues", ["acl", "--out", str(out)]) == 0
    monkeypatch.setenv("REDIS_URL", (out / "learner.url").read_text().strip())
    assert execute_command(Queues, "queues", ["acl", "--out", str(out)]) == 78
    assert "refuses this user" in capfd.readouterr().err


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_rights_on_the_keys_of_its_run_alone(role: Role) -> None:
    patterns = re.findall(r"[~]([^ )]+)", " ".join(rules(role, KEYS)))
    assert patterns
    assert set(patterns) <= set(KEYS.all)
