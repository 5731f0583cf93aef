from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import BEGINNING, Entry, WorkStream
from penstock.common.config.redis_url import with_login
from penstock.common.errors import ConfigError, RunNotReady, RunTaken, ServerUnavailable, WrongType
from penstock.common.monitor.snapshot import read_audit
from penstock.common.wire.codec import decode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import END_STATES, Verdict, Version, Weights
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.common.builders import V0, Run
from tests.helpers import wait_until, wait_until_written


def reclaimed(worker: WorkStream) -> Entry:
    """The one entry whose lease runs out next."""
    (entry,) = wait_until(lambda: worker.reclaim(10), "an expired lease to be taken over")
    return entry


# Hand-off


def test_a_handoff_moves_the_ticket_and_leaves_nothing_behind(run: Run) -> None:
    run.issue(1)
    (entry,) = run.actor().take(1)
    assert run.actor().handoff(entry, run.keys.rollouts, b"group")
    assert run.entries(run.keys.tickets) == []
    assert run.entries(run.keys.rollouts) == [(b"train:1", b"group")]
    assert run.connection.execute("XPENDING", run.keys.tickets, "workers")["pending"] == 0


def test_a_duplicate_delivery_changes_nothing(run: Run) -> None:
    run.issue(1)
    (entry,) = run.actor().take(1)
    assert run.actor().handoff(entry, run.keys.rollouts, b"group")
    before = run.contents()
    assert not run.actor().handoff(entry, run.keys.rollouts, b"again")
    assert run.contents() == before


def test_a_zombie_that_hands_off_late_changes_nothing(run: Run) -> None:
    run.issue(1)
    zombie, other = run.actor("zombie"), run.actor("other")
    (stale,) = zombie.take(1)
    assert other.handoff(reclaimed(other), run.keys.rollouts, b"group")
    before = run.contents()
    assert not zombie.handoff(stale, run.keys.rollouts, b"late")
    assert run.contents() == before


def test_the_first_to_finish_wins_even_without_its_lease(run: Run) -> None:
    run.issue(1)
    slow, other = run.actor("slow"), run.actor("other")
    (stale,) = slow.take(1)
    taken = reclaimed(other)
    assert slow.handoff(stale, run.keys.rollouts, b"first")
    assert not other.handoff(taken, run.keys.rollouts, b"second")
    assert run.entries(run.keys.rollouts) == [(b"train:1", b"first")]


def test_taking_gives_each_entry_to_one_worker(run: Run) -> None:
    run.issue(*range(6))
    taken = run.actor("a").take(3) + run.actor("b").take(9)
    assert sorted(entry.ticket for entry in taken) == [f"train:{n}" for n in range(6)]


def test_memory_running_out_loses_no_group_and_closing_still_works(
    private_server: LocalServer, keys: Keys
) -> None:
    connection = Connection(private_server.url, 10, server_timeout_s=0.3)
    run = Run(connection, keys)
    run.issue(1, 2)
    (entry,) = run.actor().take(1)
    connection.execute("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(ServerUnavailable):
        run.actor().handoff(entry, keys.rollouts, b"group")
    assert run.learner.close("train", {"train:2": "unused"}) == 1
    assert run.actor().renew([entry.id]) == [True]
    connection.execute("CONFIG", "SET", "maxmemory", "0")
    assert run.actor().handoff(entry, keys.rollouts, b"group")


def group_of(entry: Entry, size: int = 100) -> tuple[Entry, bytes]:
    """A payload of its own."""
    return entry, f"group {entry.ticket} ".encode().ljust(size, b".")


@pytest.mark.parametrize("size", [100, 100_000, 300_000])
def test_groups_handed_off_together_each_have_their_own_answer(run: Run, size: int) -> None:
    run.issue(1, 2, 3)
    run.issue(4, version=Version(2, 5))
    worker, other = run.actor(), run.actor("other")
    entries = worker.take(4)
    other.handoff(entries[1], run.keys.rollouts, b"first")
    finished = [group_of(entry, size) for entry in entries]
    again = finished[0][0], b"too late"
    answers = worker.handoff_all([*finished, again], run.keys.rollouts)
    assert answers == [True, False, True, True, False]
    before = run.contents()
    assert worker.handoff_all(finished, run.keys.rollouts) == [False] * 4
    assert run.contents() == before
    groups = run.rewarder().take(9)
    found = {entry.ticket: entry.payload for entry in groups}
    assert found == {entry.ticket: payload for entry, payload in finished} | {"train:2": b"first"}
    places = {place.ticket: (place.entry, place.first_version) for place in run.view.audit()[1]}
    versions = {"train:1": "1.0", "train:2": "1.0", "train:3": "1.0", "train:4": "2.5"}
    assert places == {entry.ticket: (entry.id, versions[entry.ticket]) for entry in groups}


@pytest.mark.parametrize("count", [1, 2])
def test_a_handoff_leaves_nothing_where_the_ticket_has_ended(run: Run, count: int) -> None:
    run.issue(*range(count))
    finished = [group_of(entry) for entry in run.actor().take(count)]
    run.connection.execute("DEL", run.keys.open)
    assert run.actor().handoff_all(finished, run.keys.rollouts) == [False] * count
    assert run.entries(run.keys.tickets) == run.entries(run.keys.rollouts) == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_handoff_to_a_server_that_lost_the_fence_is_refused(run: Run, count: int) -> None:
    run.issue(*range(count))
    finished = [group_of(entry) for entry in run.actor().take(count)]
    run.connection.execute("DEL", run.keys.fence, run.keys.open)
    with pytest.raises(RunNotReady):
        run.actor().handoff_all(finished, run.keys.rollouts)
    assert len(run.entries(run.keys.tickets)) == count
    assert run.entries(run.keys.rollouts) == []


@pytest.mark.parametrize("size", [100, 66_000])
def test_a_user_who_may_not_use_transactions_hands_off_in_order(
    private_server: LocalServer, keys: Keys, size: int
) -> None:
    run = Run(Connection(private_server.url, 10, 10), keys)
    run.issue(*range(8))
    user = ("ACL", "SETUSER", "actor", "on", ">word", "~*", "&*", "+@all", "-@transaction")
    run.connection.execute(*user)
    url = with_login(private_server.url, "actor", "word")
    limited = run.actor(connection=Connection(url, 10, 10))
    finished = [group_of(entry, size) for entry in limited.take(8)]
    assert limited.handoff_all(finished, keys.rollouts) == [True] * 8
    found = [(entry.ticket, entry.payload) for entry in run.rewarder().take(9)]
    assert found == [(entry.ticket, payload) for entry, payload in finished]


def test_groups_that_a_full_server_refuses_together_wait_until_there_is_room(
    private_server: LocalServer, keys: Keys
) -> None:
    run = Run(Connection(private_server.url, 10, server_timeout_s=10), keys)
    run.issue(1, 2)
    finished = [group_of(entry) for entry in run.actor().take(2)]
    run.connection.execute("CONFIG", "SET", "maxmemory", "1")
    impatient = Connection(private_server.url, 10, server_timeout_s=0.3)
    with pytest.raises(ServerUnavailable):
        run.actor(connection=impatient).handoff_all(finished, keys.rollouts)
    assert run.entries(keys.rollouts) == []
    make_room = threading.Timer(0.3, impatient.execute, ("CONFIG", "SET", "maxmemory", "0"))
    make_room.start()
    assert run.actor().handoff_all(finished, keys.rollouts) == [True, True]
    make_room.join()


def test_groups_handed_off_together_to_a_server_without_the_run_are_refused(
    run: Run, connection: Connection
) -> None:
    run.issue(1, 2)
    finished = [group_of(entry) for entry in run.actor().take(2)]
    connection.execute("DEL", *run.keys.all)
    with pytest.raises(RunNotReady):
        run.actor().handoff_all(finished, run.keys.rollouts)


def test_groups_handed_off_together_where_none_can_go_are_kept(run: Run) -> None:
    run.issue(1, 2)
    finished = [group_of(entry) for entry in run.actor().take(2)]
    run.connection.execute("SET", run.keys.contract, "a string, where XADD must fail")
    before = run.contents()
    with pytest.raises(WrongType, match="WRONGTYPE"):
        run.actor().handoff_all(finished, run.keys.contract)
    assert run.contents() == before
    assert run.actor().handoff_all(finished, run.keys.rollouts) == [True, True]


def test_a_handoff_that_fails_in_the_middle_loses_no_group(run: Run) -> None:
    run.issue(1)
    (entry,) = run.actor().take(1)
    run.connection.execute("SET", run.keys.contract, "a string, where XADD must fail")
    before = run.contents()
    with pytest.raises(WrongType, match="WRONGTYPE"):
        run.actor().handoff(entry, run.keys.contract, b"group")
    assert run.contents() == before
    assert run.actor().handoff(entry, run.keys.rollouts, b"group")


# Leases


def test_only_the_owner_renews(run: Run) -> None:
    run.issue(1)
    zombie, other = run.actor("zombie"), run.actor("other")
    zombie.take(1)
    taken = reclaimed(other)
    assert zombie.renew([taken.id]) == [False]
    assert other.renew([taken.id, "1-1"]) == [True, False]


def test_a_reclaim_counts_the_attempt(run: Run) -> None:
    run.issue(1)
    run.actor("dead").take(1)
    assert reclaimed(run.actor("other")).attempts == 1


def test_a_renewed_lease_is_not_reclaimed(run: Run) -> None:
    run.issue(1, 2)
    owner, other = run.actor("owner"), run.actor("other")
    kept, lost = owner.take(2)
    found: list[Entry] = []

    def renew_and_reclaim() -> list[Entry]:
        assert owner.renew([kept.id]) == [True]
        found.extend(other.reclaim(10))
        return found

    wait_until(renew_and_reclaim, "the other lease to run out")
    assert [entry.id for entry in found] == [lost.id]


def test_an_outage_longer_than_a_lease_counts_no_attempt(
    private_server: LocalServer, keys: Keys
) -> None:
    connection = Connection(private_server.url, 10, 10)
    run = Run(connection, keys)
    run.issue(1)
    owner, other = run.actor("owner", lease_s=1.0), run.actor("other", lease_s=1.0)
    (entry,) = owner.take(1)
    wait_until_written(connection)
    private_server.kill()
    died = time.monotonic()
    wait_until(lambda: time.monotonic() - died > 1.1, "an outage longer than the lease")
    private_server.start()
    assert other.reclaim(10) == []
    assert owner.renew([entry.id]) == [True]


def test_a_consumer_that_owns_work_is_not_removed(run: Run) -> None:
    run.issue(1)
    worker = run.actor()
    (entry,) = worker.take(1)
    worker.leave()
    assert worker.renew([entry.id]) == [True]
    worker.handoff(entry, run.keys.rollouts, b"group")
    worker.leave()
    assert run.connection.execute("XINFO", "CONSUMERS", run.keys.tickets, "workers") == []


# Attempts and burial


def test_a_ticket_that_dies_in_company_is_never_doomed(run: Run) -> None:
    run.issue(1)
    worker = run.actor(lease_s=0.02)
    worker.take(1)
    for _ in range(6):
        entry = reclaimed(worker)
        assert not entry.doomed
    assert worker.runs_alone(entry)


def test_a_ticket_that_dies_alone_is_doomed_and_buried(run: Run) -> None:
    run.issue(1)
    worker = run.actor(lease_s=0.05)
    worker.take(1)
    while not worker.runs_alone(entry := reclaimed(worker)):
        pass
    assert worker.mark_alone(entry)
    assert reclaimed(worker).doomed
    entry = reclaimed(worker)  # whoever takes it over from one that died before the burial
    assert entry.doomed
    assert worker.bury(entry, "train", "killed its engine")
    verdict = decode(run.learner.outcomes("train", BEGINNING, 10)[0].payload, Verdict)
    assert (verdict.ticket_id, verdict.state) == ("train:1", "dead")
    assert run.entries(run.keys.dead) == [(b"train:1", b"ask")]


def test_a_delivery_count_that_another_client_set_dooms_nothing(run: Run) -> None:
    run.issue(1)
    worker = run.actor(lease_s=0.05)
    (entry,) = worker.take(1)
    claim = f"redis.call('XCLAIM', KEYS[1], '{GROUP}', 'x', 0, ARGV[1], 'RETRYCOUNT', 999999999)"
    run.connection.execute("EVAL", claim, 1, run.keys.tickets, entry.id)
    again = reclaimed(worker)
    assert (again.attempts, again.doomed) == (1, False)


def last_attempt(worker: WorkStream) -> Entry:
    """An entry whose next lost lease, while alone, is its end."""
    worker.take(1)
    while not worker.runs_alone(entry := reclaimed(worker)):
        pass
    return entry


def test_only_the_holder_marks_a_ticket_as_alone(run: Run) -> None:
    run.issue(1)
    zombie, other = run.actor("zombie", lease_s=0.02), run.actor("other", lease_s=0.02)
    stale = last_attempt(zombie)
    assert reclaimed(other).id == stale.id
    assert not zombie.mark_alone(stale)
    assert not reclaimed(other).doomed
    assert other.mark_alone(stale)


def test_work_that_is_given_back_keeps_its_attempts_and_runs_alone_no_more(run: Run) -> None:
    run.issue(1)
    worker = run.actor(lease_s=0.02)
    entry = last_attempt(worker)
    assert worker.mark_alone(entry)
    assert worker.give_back(entry)
    (again,) = worker.take(1)
    assert (again.attempts, again.payload, again.doomed) == (2, b"ask", False)
    assert not reclaimed(worker).doomed


def test_what_was_sampled_goes_back_with_the_ticket_until_an_attempt_fails(run: Run) -> None:
    run.issue(1)
    first, second = run.actor("first", lease_s=0.02), run.actor("second", lease_s=0.02)
    assert first.give_back(first.take(1)[0], b"some tokens")
    (taken,) = first.take(1)
    assert (taken.partial, taken.payload, taken.attempts) == (b"some tokens", b"ask", 0)
    late = reclaimed(second)  # the first one is killed
    assert (late.partial, late.attempts) == (b"some tokens", 1)
    assert second.give_back(late)
    (again,) = second.take(1)
    assert (again.partial, again.attempts) == (b"some tokens", 1)
    assert second.give_back(again, b"more tokens")
    (last,) = second.take(1)
    assert last.partial == b"more tokens"
    assert not second.fail(last, "train", "refused")
    assert second.take(1)[0].partial == b""


@pytest.mark.parametrize("verb", ["give back", "fail", "bury"])
def test_only_the_holder_puts_back_or_buries(run: Run, verb: str) -> None:
    run.issue(1)
    zombie, other = run.actor("zombie", max_attempts=1), run.actor("other")
    (stale,) = zombie.take(1)
    held = reclaimed(other)
    before = run.contents()
    late = {
        "give back": lambda: zombie.give_back(stale),
        "fail": lambda: zombie.fail(stale, "train", "late"),
        "bury": lambda: zombie.bury(stale, "train", "late"),
    }
    assert not late[verb]()
    assert run.contents() == before
    assert other.handoff(held, run.keys.rollouts, b"group")


def test_burying_what_was_deleted_by_hand_keeps_the_payload(run: Run) -> None:
    run.issue(1)
    worker = run.actor(max_attempts=1)
    (entry,) = worker.take(1)
    run.connection.execute("XDEL", run.keys.tickets, entry.id)
    assert worker.bury(entry, "train", "no luck")
    assert run.entries(run.keys.dead) == [(b"train:1", b"ask")]
    assert len(run.learner.outcomes("train", BEGINNING, 10)) == 1


def test_a_zombie_leaves_an_entry_alone_that_was_given_its_number_again(run: Run) -> None:
    """A clock set back across a rollback of the server gives an id a second time."""
    run.issue(1)
    zombie = run.actor("zombie")
    (stale,) = zombie.take(1)
    run.learner.close("train", {"train:1": "stale"})
    run.connection.execute("DEL", run.keys.tickets)
    run.learner.claim("nonce", "test")
    run.connection.execute("XADD", run.keys.tickets, stale.id, "t", "train:2", "d", b"another")
    assert not zombie.handoff(stale, run.keys.rollouts, b"late")
    assert run.entries(run.keys.tickets) == [(b"train:2", b"another")]


def test_a_poison_ticket_ends_even_where_a_single_attempt_is_allowed(run: Run) -> None:
    run.issue(1)
    worker = run.actor(lease_s=0.05, max_attempts=1)
    worker.take(1)
    entry = reclaimed(worker)
    assert worker.runs_alone(entry)
    worker.mark_alone(entry)
    assert reclaimed(worker).doomed


def test_a_failed_attempt_goes_to_the_end_of_the_stream(run: Run) -> None:
    run.issue(1, 2)
    worker = run.actor()
    (entry,) = worker.take(1)
    assert not worker.fail(entry, "train", "no luck")
    second, again = worker.take(5)
    assert (second.ticket, second.attempts) == ("train:2", 0)
    assert (again.ticket, again.attempts) == ("train:1", 1)


def test_the_last_failed_attempt_buries_the_ticket(run: Run) -> None:
    run.issue(1)
    worker = run.actor(max_attempts=3)
    buried = [worker.fail(worker.take(1)[0], "train", "no luck") for _ in range(3)]
    assert buried == [False, False, True]
    assert run.entries(run.keys.dead) == [(b"train:1", b"ask")]
    assert run.entries(run.keys.tickets) == []
    assert len(run.learner.outcomes("train", BEGINNING, 10)) == 1


def test_a_zombie_cannot_fail_what_another_finished(run: Run) -> None:
    run.issue(1)
    worker = run.actor(max_attempts=1)
    (entry,) = worker.take(1)
    worker.handoff(entry, run.keys.rollouts, b"group")
    assert not worker.fail(entry, "train", "late")
    assert not worker.bury(entry, "train", "late")
    assert run.entries(run.keys.dead) == []


def test_attempts_end_with_their_stage(run: Run) -> None:
    run.issue(1)
    actor = run.actor()
    actor.fail(actor.take(1)[0], "train", "no luck")
    actor.handoff(actor.take(1)[0], run.keys.rollouts, b"group")
    assert run.rewarder().take(1)[0].attempts == 0


# Issuing and closing


def test_issuing_a_number_that_is_alive_is_a_no_op_and_returns_its_first_version(run: Run) -> None:
    run.issue(1, 2)
    actor = run.actor()
    actor.handoff(actor.take(1)[0], run.keys.rollouts, b"group")
    before = run.contents()
    assert run.issue(1, 2, version=Version(2, 5)) == [V0, V0]
    assert run.contents() == before


def test_a_ticket_that_would_be_issued_otherwise_now_is_replaced_before_its_group(run: Run) -> None:
    """With a changed setting, the answer to the old entry would end stale."""
    run.issue(1, 2)
    actor = run.actor()
    first, held = actor.take(2)
    actor.handoff(first, run.keys.rollouts, b"group")
    assert run.issue(1, 2, payload=b"other") == [V0, V0]
    assert run.entries(run.keys.rollouts) == [(b"train:1", b"group")]
    assert not actor.handoff(held, run.keys.rollouts, b"to the old one")
    assert [entry.payload for entry in actor.take(9)] == [b"other"]
    assert run.view.audit()[0] == {"issued": 2}


def test_issuing_restores_a_ticket_whose_entry_vanished(run: Run) -> None:
    run.issue(1)
    run.connection.execute("XTRIM", run.keys.tickets, "MAXLEN", 0)
    assert not run.view.audit()[1][0].exists
    assert run.issue(1, version=Version(2, 5)) == [V0]
    totals, (place,), _ = run.view.audit()
    assert place.exists
    assert totals == {"issued": 1}
    assert run.actor().take(1)[0].ticket == "train:1"


def test_what_was_issued_anew_is_worked_on_once(run: Run) -> None:
    run.issue(1)
    (lost,) = run.actor("first").take(1)
    run.connection.execute("XDEL", run.keys.tickets, lost.id)
    run.issue(1)
    (entry,) = run.actor("second").take(1)
    run.actor("second").handoff(entry, run.keys.rollouts, b"group")
    run.actor("first").handoff(lost, run.keys.rollouts, b"late")
    assert run.entries(run.keys.rollouts) == [(b"train:1", b"group")]


def at_tickets(_run: Run) -> None:
    pass


def at_actor(run: Run) -> None:
    run.actor().take(1)


def at_rollouts(run: Run) -> None:
    run.actor().handoff(run.actor().take(1)[0], run.keys.rollouts, b"group")


def at_rewarder(run: Run) -> None:
    at_rollouts(run)
    run.rewarder().take(1)


def at_scored(run: Run) -> None:
    at_rollouts(run)
    run.rewarder().handoff(run.rewarder().take(1)[0], run.keys.scored, b"scored")


PLACES = [at_tickets, at_actor, at_rollouts, at_rewarder, at_scored]


@pytest.mark.parametrize("bring", PLACES, ids=lambda place: place.__name__)
def test_closing_ends_a_ticket_wherever_its_entry_lies(run: Run, bring: Callable[[Run], None]) -> None:
    run.issue(1)
    bring(run)
    assert run.learner.close("train", {"train:1": "stale"}) == 1
    streams = (*run.keys.work_streams, *run.keys.outcome_streams)
    assert [run.entries(stream) for stream in streams] == [[]] * len(streams)
    assert run.view.audit() == ({"issued": 1, "stale": 1}, [], 0)


def test_a_handoff_of_a_closed_ticket_is_refused_and_touches_nothing_else(run: Run) -> None:
    run.issue(1, 2, 3)
    first, second = run.actor().take(2)
    run.learner.close("train", {"train:1": "stale"})
    before = run.contents()
    assert not run.actor().handoff(first, run.keys.rollouts, b"late")
    assert run.contents() == before
    assert run.actor().handoff(second, run.keys.rollouts, b"group")


def test_closing_twice_counts_once(run: Run) -> None:
    run.issue(1)
    assert run.learner.close("train", {"train:1": "trained"}) == 1
    assert run.learner.close("train", {"train:1": "trained"}) == 0
    assert run.view.audit()[0] == {"issued": 1, "trained": 1}


def test_outcomes_come_in_the_streams_order_after_a_position(run: Run) -> None:
    run.issue(1, 2, 3)
    for entry in run.actor().take(3):
        run.actor().handoff(entry, run.keys.rollouts, b"group")
    for entry in reversed(run.rewarder().take(3)):
        run.rewarder().handoff(entry, run.keys.scored, b"scored")
    first, *rest = run.learner.outcomes("train", BEGINNING, 10)
    assert first.ticket == "train:3"
    assert run.learner.outcomes("train", first.id, 10) == rest
    run.learner.close("train", {first.ticket: "trained"}, [first.id])
    assert run.learner.outcomes("train", BEGINNING, 10) == rest


def test_the_learners_totals_overwrite_the_servers(run: Run) -> None:
    run.issue(1)
    run.learner.set_totals({"issued": 9, "trained": 8})
    assert run.view.audit()[0] == {"issued": 9, "trained": 8}


# One learner

VERBS: dict[str, Callable[[LearnerQueue], object]] = {
    "claim": lambda queue: queue.claim("nonce", "old"),
    "beat": lambda queue: queue.beat(30.0, "training"),
    "issue": lambda queue: queue.issue("train", [("train:9", V0, b"ask")]),
    "outcomes": lambda queue: queue.outcomes("train", BEGINNING, 1),
    "close": lambda queue: queue.close("train", {"train:1": "trained"}),
    "publish_contract": lambda queue: queue.publish_contract(b"contract"),
    "announce": lambda queue: queue.announce(Weights(V0, "path", "hash", "")),
    "set_state": lambda queue: queue.set_state("ended"),
    "set_totals": lambda queue: queue.set_totals({"issued": 0}),
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_older_incarnation_is_refused(run: Run, verb: str) -> None:
    run.issue(1)
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "new")
    before = run.contents()
    with pytest.raises(RunTaken, match="incarnation 2"):
        VERBS[verb](run.learner)
    assert run.contents() == before
    assert not run.view.ended()
    assert run.view.weights() is None


def test_a_run_of_this_name_from_another_folder_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="another folder"):
        LearnerQueue(run.connection, run.keys, 5).claim("other nonce", "stranger")
    assert run.view.incarnation() == 1


def test_claiming_again_keeps_what_is_in_flight(run: Run) -> None:
    run.issue(1)
    run.actor().take(1)
    before = run.contents()
    LearnerQueue(run.connection, run.keys, 2).claim("nonce", "resumed")
    assert run.contents() == before


def test_workers_are_told_when_the_run_is_not_set_up(run: Run) -> None:
    nobody = Keys("never-set-up")
    worker = WorkStream(run.connection, nobody, nobody.tickets, "actor", 1.0, 3)
    for call in (
        lambda: worker.take(1),
        lambda: worker.reclaim(1),
        lambda: worker.renew(["1-1"]),
        lambda: worker.handoff(Entry("1-1", TicketId("train:1"), b""), nobody.rollouts, b""),
        lambda: worker.fail(Entry("1-1", TicketId("train:1"), b""), "train", "x"),
    ):
        with pytest.raises(RunNotReady):
            call()


# The books


def random_steps(run: Run, chance: random.Random) -> list[Callable[[], None]]:
    """What may happen to a run, each in some random way."""
    workers = [run.actor(f"actor-{n}", lease_s=0.001) for n in range(3)]
    rewarder = run.rewarder()
    numbers = itertools.count()

    def issue() -> None:
        run.issue(*itertools.islice(numbers, 3))

    def finish() -> None:
        worker = chance.choice(workers)
        for entry in worker.take(2) + worker.reclaim(1):
            worker.handoff(entry, run.keys.rollouts, b"group")

    def fail() -> None:
        worker = chance.choice(workers)
        for entry in worker.take(1):
            worker.fail(entry, "train", "no luck")

    def die() -> None:
        chance.choice(workers).take(1)

    def score() -> None:
        for entry in rewarder.take(2):
            rewarder.handoff(entry, run.keys.scored, b"scored")

    def close() -> None:
        for entry in run.learner.outcomes("train", BEGINNING, 2):
            run.learner.close("train", {entry.ticket: chance.choice(END_STATES)}, [entry.id])

    return [issue, finish, fail, die, score, close]


def test_the_books_balance_after_every_step_of_a_random_history(run: Run, run_name: str) -> None:
    chance = random.Random(1)
    steps = random_steps(run, chance)
    for _ in range(300):
        chance.choice(steps)()
        assert read_audit(run.connection, run_name).faults == ()
    assert sum(read_audit(run.connection, run_name).ended.values()) > 20


def test_the_books_balance_at_any_instant_of_a_busy_run(
    run: Run, run_name: str, queue_server: LocalServer
) -> None:
    count = 300
    run.issue(*range(count))
    done = threading.Event()

    def work(kind: str, name: str) -> None:
        connection = Connection(queue_server.url, 10, 10)
        worker = getattr(run, kind)(name, connection=connection)
        target = run.keys.rollouts if kind == "actor" else run.keys.scored
        while not done.is_set():
            for entry in worker.take(4, block_ms=20):
                worker.handoff(entry, target, b"done")

    names = [("actor", "a1"), ("actor", "a2"), ("rewarder", "r1")]
    threads = [threading.Thread(target=work, args=args) for args in names]
    for thread in threads:
        thread.start()
    closed, audits = 0, 0

    def learn() -> bool:
        nonlocal closed, audits
        found = run.learner.outcomes("train", BEGINNING, 20)
        ends = {entry.ticket: "trained" for entry in found}
        closed += run.learner.close("train", ends, [entry.id for entry in found])
        audits += 1
        assert read_audit(run.connection, run_name).faults == ()
        return closed == count

    try:
        wait_until(learn, "all tickets to be closed")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert run.view.audit() == ({"issued": count, "trained": count}, [], 0)
