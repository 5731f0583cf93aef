"""What happens when a command was carried out and nobody heard of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from penstock.common.broker import connection as connection_module
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import BEGINNING, WorkStream
from penstock.common.errors import PenstockError
from penstock.common.wire.messages import Weights
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.builders import V0, Run
from tests.helpers import LossyProxy, wait_until


@pytest.fixture
def proxy(queue_server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[LossyProxy]:
    monkeypatch.setattr(connection_module, "_RETRY_EVERY_S", 0.01)
    with LossyProxy(queue_server.url) as proxy:
        yield proxy


@pytest.fixture
def lossy_run(proxy: LossyProxy, keys: Keys) -> Iterator[Run]:
    """A run whose network loses what the proxy is told to."""
    connection = Connection(proxy.url, 10, 10)
    yield Run(connection, keys)
    connection.close()


def play(run: Run, lose: Callable[[str], None]) -> list[object]:
    """A history with every verb in it, each announced to `lose` before it is called."""
    lose("claim")
    LearnerQueue(run.connection, run.keys, 1).claim("nonce", "again")
    lose("issue")
    said: list[object] = [run.issue(1, 2, 3, 4)]
    lose("put")
    run.learner.announce(Weights(V0, "path", "hash", ""))
    actor = run.actor(max_attempts=2, lease_s=5.0)
    taken = actor.take(4)
    lose("renew")
    said.append(actor.renew([entry.id for entry in taken]))
    for entry in taken[:2]:
        lose("handoff")
        actor.handoff(entry, run.keys.rollouts, b"group")
    lose("put_back")
    actor.fail(taken[2], "train", "no luck")
    lose("mark_alone")
    said.append(actor.mark_alone(taken[3]))
    lose("bury")
    actor.bury(taken[3], "train", "hopeless")
    (again,) = actor.take(4)
    said.append(again.attempts)
    lose("put_back")
    actor.fail(again, "train", "no luck")
    scorer = run.rewarder()
    for entry in scorer.take(2):
        lose("handoff")
        scorer.handoff(entry, run.keys.scored, b"scored")
    lose("outcomes")
    found = run.learner.outcomes("train", BEGINNING, 10)
    said.append([entry.ticket for entry in found])
    lose("close")
    run.learner.close("train", {"train:1": "trained", "train:4": "dead"}, [found[0].id])
    lose("set_totals")
    run.learner.set_totals({"issued": 4, "trained": 1, "dead": 1})
    lose("audit")
    return [*said, run.contents()]


def test_a_history_in_which_every_reply_is_lost_once_ends_as_without_losses(
    lossy_run: Run, proxy: LossyProxy, connection: Connection, run_name: str
) -> None:
    asked = 0

    def lose(verb: str) -> None:
        nonlocal asked
        asked += 1
        proxy.lose_reply_to(f"penstock_4_{verb}".encode())

    calm = play(Run(connection, Keys(run_name + "-calm")), lambda _: None)
    found = play(lossy_run, lose)
    assert proxy.lost == asked
    assert str(found) == str(calm).replace(run_name + "-calm", run_name)


def test_entries_whose_delivery_was_lost_are_taken_at_once_and_uncounted(
    lossy_run: Run, proxy: LossyProxy
) -> None:
    lossy_run.issue(1, 2, 3)
    worker = lossy_run.actor()
    (known,) = worker.take(1)
    proxy.lose_reply_to(b"XREADGROUP")
    found = worker.take(1)
    assert proxy.lost == 1
    assert [(entry.ticket, entry.attempts) for entry in found] == [
        ("train:1", 0), ("train:2", 0), ("train:3", 0)
    ]  # fmt: skip
    assert found[0] == known
    assert lossy_run.actor("other").take(1) == []


def test_a_delivery_that_was_lost_with_its_process_comes_back_through_the_lease(
    lossy_run: Run, proxy: LossyProxy
) -> None:
    lossy_run.issue(1)
    lossy_run.actor("dead").take(1)
    other = lossy_run.actor()
    (entry,) = wait_until(lambda: other.reclaim(1), "the lease to run out")
    assert (entry.ticket, entry.attempts) == ("train:1", 1)


def test_entries_whose_takeover_was_lost_are_taken_at_once_and_counted_once(
    lossy_run: Run, proxy: LossyProxy
) -> None:
    lossy_run.issue(1)
    lossy_run.actor("dead").take(1)
    other = lossy_run.actor("other")
    proxy.lose_reply_to(b"penstock_4_reclaim")
    wait_until(lambda: other.reclaim(1) or proxy.lost, "the lease to run out")
    (entry,) = other.take(1)
    assert (entry.ticket, entry.attempts) == ("train:1", 1)
    assert other.take(1) == []


@pytest.mark.parametrize("size", [5, 300_000])
def test_groups_handed_off_together_are_there_once_when_a_reply_is_lost(
    lossy_run: Run, proxy: LossyProxy, size: int
) -> None:
    lossy_run.issue(1, 2, 3)
    finished = [(entry, b"g" * size) for entry in lossy_run.actor().take(3)]
    proxy.lose_reply_to(b"penstock_4_handoff")
    answers = lossy_run.actor().handoff_all(finished, lossy_run.keys.rollouts)
    if size == 5:  # larger ones go in several pieces, some of which may be lost with the reply
        assert answers == [False] * 3  # all was done when it was sent again
    assert proxy.lost == 1
    groups = lossy_run.rewarder().take(9)
    assert [entry.ticket for entry in groups] == ["train:1", "train:2", "train:3"]
    assert [entry.payload for entry in groups] == [payload for _, payload in finished]


def test_a_question_after_a_new_socket_may_lose_its_reply_as_well(
    lossy_run: Run, proxy: LossyProxy
) -> None:
    """The hand-off was done by then, and is sent again."""
    lossy_run.issue(1, 2)
    finished = [(entry, b"group") for entry in lossy_run.actor().take(2)]
    lossy_run.connection.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no")
    proxy.lose_reply_to(b"\r\nINFO\r\n$6\r\nserver")
    assert lossy_run.actor().handoff_all(finished, lossy_run.keys.rollouts) == [False, False]
    assert proxy.lost == 1
    groups = lossy_run.rewarder().take(9)
    assert [entry.ticket for entry in groups] == ["train:1", "train:2"]


def test_a_process_that_starts_asks_again_for_what_it_checks(proxy: LossyProxy) -> None:
    proxy.lose_reply_to(b"memory")
    Connection(proxy.url, 10, 10).close()
    assert proxy.lost == 1


def test_with_every_every_so_many_replies_are_lost_and_no_more(queue_server: LocalServer) -> None:
    with LossyProxy(queue_server.url, every=20) as proxy:
        connection = Connection(proxy.url, 10, 10)
        assert [connection.execute("ECHO", number) for number in range(100)] == [
            str(number).encode() for number in range(100)
        ]
        connection.close()
    assert proxy.lost == proxy.replies // 20 >= 5


def test_the_naive_way_does_lose_and_double_on_this_network(lossy_run: Run, proxy: LossyProxy) -> None:
    """The suite would notice: XADD then XACK, each repeated until answered, trains twice."""
    lossy_run.issue(1)
    worker = lossy_run.actor()
    (entry,) = worker.take(1)
    naive_handoff(lossy_run, worker, entry.id, lambda: proxy.lose_reply_to(b"XADD"))
    assert len(lossy_run.entries(lossy_run.keys.rollouts)) == 2


def naive_handoff(run: Run, worker: WorkStream, entry: str, before: Callable[[], None]) -> None:
    before()
    with contextlib.suppress(PenstockError):
        run.connection.execute("XADD", run.keys.rollouts, "*", "t", "train:1", "d", "group")
        run.connection.execute("XACK", worker.stream, "workers", entry)
