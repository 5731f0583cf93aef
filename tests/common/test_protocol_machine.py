"""Random histories of the stream protocol on a real queue server, each step held against a model.

Hypothesis picks what happens next: several workers, their zombies and crashes, a learner that is killed
and superseded, a server that loses its last writes. The verbs are the real ones
(common/broker/work_stream.py, learner/streams/learner_queue.py, and the learner's TicketFlow, CommitLog
and Ledger on a journal in memory); what each must answer and leave behind is said by protocol_model.py.

    PROTOCOL_EXAMPLES=5000 pytest tests/common/test_protocol_machine.py      longer, other histories
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import BEGINNING
from penstock.common.wire.messages import Version, Weights
from tests.common.protocol_learner import PLAN
from tests.common.protocol_model import ISSUED, OUTCOMES, WORK
from tests.common.protocol_world import (
    DUMP,
    MOST_ATTEMPTS,
    RESTORE,
    Hand,
    ProtocolWorld,
    Snapshot,
    choose,
    plain,
    state_of,
)

pytestmark = pytest.mark.e2e  # a quarter of a minute

STEPS = 50
LONGER = int(os.environ.get("PROTOCOL_EXAMPLES", "0"))

PICK = st.integers(0, 30)
WORST = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5])  # mostly the first of those sorted by attempts
KILLED = st.sampled_from([False, False, False, True])
CALM = 8  # verbs between one trouble and the next
COUNT = st.integers(1, 3)


class ProtocolMachine(ProtocolWorld):
    """What may happen next."""

    @initialize(counts=st.tuples(*[st.integers(1, 4)] * 4), evaluate=st.booleans())
    def begin(self, counts: tuple[int, ...], evaluate: bool) -> None:
        """Some work at every stage."""
        self.announce(evaluate)
        self.issue(sum(counts))
        for pick, count in enumerate(counts[1:]):
            if any(map(self._fresh, WORK)):
                self.take(pick, count)
            self.finish(pick, False)
        self._work(self._worker_of(["rollouts"], 0), counts[0])
        self.reach_the_disk()

    # The learner

    @rule(count=COUNT)
    def issue(self, count: int) -> None:
        self._learn(lambda: self.learner.issue(count), lambda: self.learner_model.issue(count))

    @precondition(lambda self: self.model.now.places)
    @rule(pick=WORST)
    def issue_again_what_is_open(self, pick: int) -> None:
        """Alive, or with an entry that is gone."""
        places = self.model.now.places
        gone = [ticket for ticket in places if self.model.find(*places[ticket][:2]) is None]
        self._issue_by_name(choose([*gone, *places], pick))

    @precondition(lambda self: self._closed())
    @rule(pick=PICK, answered=st.booleans())
    def issue_what_is_closed(self, pick: int, answered: bool) -> None:
        """A mistake; its group must not be trained, and the next repair withdraws it."""
        ticket = choose(self._closed(), pick)
        self.misissued.add(ticket)
        self._issue_by_name(ticket)
        if answered and not self.repair_due:
            for stream in ("tickets", "rollouts"):
                self._work(self._worker_of([stream], pick), 100)
            self.read(0, 100)
            self._end([], "stale", False)  # its entry is deleted, but nobody closed the ticket

    @rule(evaluate=st.booleans())
    def announce(self, evaluate: bool) -> None:
        version = f"{self.learner.incarnation}.{next(self.versions)}"
        if self._learn(
            lambda: self.learner.announce(version), lambda: self.learner_model.announce(version)
        ):
            return
        if evaluate:
            questions = len(PLAN.source.eval_questions)
            self._learn(
                lambda: self.learner.evaluate(version), lambda: self.learner_model.evaluate(questions)
            )

    @precondition(lambda self: self.repair_due or self._unread())
    @rule(pick=PICK, count=COUNT)
    def read(self, pick: int, count: int) -> None:
        """As the learner does it: repair first, if another server answers than before."""
        purpose = choose(self._unread() or OUTCOMES, pick)
        if self.repair_due:
            self._repair()
        ends: dict[str, str] = {}

        def expected() -> list:
            items, found = self.learner_model.read(purpose, count, state_of)
            ends.update(found)
            return [(item.uid, item.ticket, item.payload) for item in items]

        self._learn(lambda: self._known(OUTCOMES[purpose], self.learner.read(purpose, count)), expected)
        for ticket, state in ends.items():
            self.learner.end(ticket, state)

    @precondition(lambda self: self.learner_model.held)
    @rule(count=COUNT, killed=KILLED)
    def train(self, count: int, killed: bool) -> None:
        batch = list(self.learner_model.held)[:count]
        assert not self.trained & set(batch)
        self.trained |= set(batch)
        self._end(batch, "trained", killed)

    @precondition(lambda self: self._unread() and not self.repair_due)
    @rule(count=COUNT)
    def learn(self, count: int) -> None:
        """A healthy learner."""
        self.read(0, count)
        if self.learner_model.held:
            self.train(count, False)
        self.issue(count)

    @precondition(lambda self: self.learner_model.books.open)
    @rule(pick=PICK, killed=KILLED)
    def end_as_stale(self, pick: int, killed: bool) -> None:
        self._end([choose(self.learner_model.books.open, pick)], "stale", killed)

    @precondition(lambda self: self._closed())
    @rule(pick=PICK)
    def end_again(self, pick: int) -> None:
        """As after a lost reply; nothing is counted twice."""
        ticket = choose(self._closed()[::-1], pick)
        self._learn(
            lambda: self.learner.queue.close("train", {ticket: "stale"}),
            lambda: self.model.close(self.learner.incarnation, "scored", {ticket: "stale"}),
        )

    @precondition(lambda self: self.calm > CALM)
    @rule()
    def crash(self) -> None:
        self._restart()

    @precondition(lambda self: self.calm > CALM)
    @rule(killed=st.booleans())
    def repair(self, killed: bool) -> None:
        """It writes down what ended before it withdraws it."""
        if killed and self._unread() and not self.repair_due:
            self.read(0, 100)
        self._repair()
        if killed:
            self._restart()

    @precondition(lambda self: self.superseded)
    @rule(pick=PICK, verb=st.sampled_from(["claim", "issue", "read", "end", "announce", "totals"]))
    def a_superseded_learner_speaks(self, pick: int, verb: str) -> None:
        """It is refused, unless the server lost the newer claim: until that is made again."""
        old = choose(self.superseded, pick)
        number = old.incarnation
        ticket = f"train:{pick}"
        calls: dict[str, tuple[Callable, Callable]] = {
            "claim": (lambda: old.claim("nonce", "old"), lambda: self.model.claim(number)),
            "issue": (
                lambda: [str(v) for v in old.issue("train", [(ticket, Version(0, 0), b"old")])],
                lambda: self.model.issue(number, "tickets", [(ticket, "0.0", b"old")]),
            ),
            "read": (
                lambda: self._known("scored", old.outcomes("train", BEGINNING, 1)),
                lambda: plain(self.model.outcomes(number, "scored", -1, 1)),
            ),
            "end": (
                lambda: old.close("train", {ticket: "unused"}),
                lambda: self.model.close(number, "scored", {ticket: "unused"}),
            ),
            "announce": (
                lambda: old.announce(Weights(Version(0, 0), "folder", "hash", "")),
                lambda: self.model.put(number),
            ),
            "totals": (
                lambda: old.set_totals(self.model.now.totals),
                lambda: self.model.set_totals(number, self.model.now.totals),
            ),
        }
        if self._agree(*calls[verb]) is None and verb == "issue":
            self.misissued.add(ticket)

    # Workers

    @precondition(lambda self: any(map(self._fresh, WORK)))
    @rule(pick=PICK, count=COUNT)
    def take(self, pick: int, count: int) -> None:
        self._take(*self._worker_of(list(filter(self._fresh, WORK)), pick), count)

    @precondition(lambda self: self._streams_with(lambda item: item.late))
    @rule(pick=PICK, count=COUNT)
    def reclaim(self, pick: int, count: int) -> None:
        self._reclaim(*self._worker_of(self._streams_with(lambda item: item.late), pick), count)

    @precondition(lambda self: self._leased())
    @rule(pick=WORST, by=PICK, reclaimed=st.booleans())
    def lose_lease(self, pick: int, by: int, reclaimed: bool) -> None:
        """Its worker died, or hung: time goes by until the lease is over."""
        self._let_leases_run_out([choose(self._leased(), pick)])
        if reclaimed:
            self.reclaim(by, 3)

    @precondition(lambda self: self._leased())
    @rule(pick=WORST, by=PICK, marked=st.booleans())
    def kill_every_worker(self, pick: int, by: int, marked: bool) -> None:
        """A poison ticket: whoever takes it over loses the lease as well, at last alone with it."""
        stream, item = choose(self._leased(), pick)
        for attempt in range(MOST_ATTEMPTS):
            self._let_leases_run_out([(stream, item)])
            known = len(self.hands)
            self._reclaim(*self._worker_of([stream], by + attempt), 100)
            (hand,) = (hand for hand in self.hands[known:] if hand.uid == item.uid)
            if marked and hand.worker.runs_alone(hand.entry):
                self._mark_alone(hand)

    @precondition(lambda self: self._busy())
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), by=PICK)
    def renew(self, picks: list[int], by: int) -> None:
        """Also what others hold, or held."""
        hands = [choose(self._busy(), picks[0]), *map(self._hand, picks[1:])]
        stream, worker = self._worker_of([hands[0].stream], by)
        entries = [hand for hand in hands if hand.stream == stream]
        self._agree(
            lambda: worker.renew([hand.entry.id for hand in entries]),
            lambda: self.model.renew(stream, worker.consumer, [hand.uid for hand in entries]),
        )

    @precondition(lambda self: self._lonely())
    @rule(pick=PICK)
    def run_alone(self, pick: int) -> None:
        """A last attempt; one that lost the lease may not."""
        self._mark_alone(choose(self._lonely(), pick))

    @precondition(lambda self: self._busy())
    @rule(pick=PICK, twice=st.booleans())
    def finish(self, pick: int, twice: bool) -> None:
        """Not always by the one with the lease; a lost reply makes it say so again."""
        hand = choose(self._busy(), pick)
        self._hand_off(hand, self._next_stream(hand), b"group %d" % next(self.payloads), twice)

    @precondition(lambda self: any(hand.stream != "rollouts" for hand in self.hands))
    @rule(pick=PICK, count=COUNT, twice=st.booleans())
    def finish_together(self, pick: int, count: int, twice: bool) -> None:
        """An actor's, also such as others have finished, or have by now."""
        last = choose([hand for hand in self.hands[::-1] if hand.stream != "rollouts"], pick)
        same = [hand for hand in self.hands if (hand.stream, hand.worker) == (last.stream, last.worker)]
        self._hand_off_all([*[hand for hand in same if hand is not last][-count:], last], twice)

    @precondition(lambda self: self.hands)
    @rule(pick=PICK)
    def finish_at_any_time(self, pick: int) -> None:
        """Long after others have, maybe."""
        hand = self._hand(pick)
        self._hand_off(hand, self._next_stream(hand), b"group %d" % next(self.payloads), False)

    @precondition(lambda self: self._fresh("tickets") or self._fresh("eval_tickets"))
    @rule(pick=PICK, count=COUNT)
    def generate(self, pick: int, count: int) -> None:
        """A healthy actor."""
        self._work(self._worker_of(list(filter(self._fresh, ISSUED.values())), pick), count)

    @precondition(lambda self: self._fresh("rollouts"))
    @rule(pick=PICK, count=COUNT, filtered=st.booleans())
    def score(self, pick: int, count: int, filtered: bool) -> None:
        """A healthy rewarder."""
        self._work(self._worker_of(["rollouts"], pick), count, filtered)

    @precondition(lambda self: self._busy())
    @rule(pick=PICK, sampled=st.booleans())
    def give_back(self, pick: int, sampled: bool) -> None:
        """A worker that has to end, maybe with what it has sampled."""
        self._give_back(choose(self._busy(), pick), sampled)

    @precondition(lambda self: self._busy())
    @rule(pick=WORST, killed=KILLED, late=KILLED)
    def fail(self, pick: int, killed: bool, late: bool) -> None:
        """A worker that dies between the last failure and the burial buries nothing."""
        hands = self.hands if late else self._busy()
        hand = choose(sorted(hands, key=lambda hand: -self._attempts(hand)), pick)
        self._fail(hand, killed)

    @precondition(lambda self: self._busy())
    @rule(pick=PICK, killed=KILLED)
    def fail_for_ever(self, pick: int, killed: bool) -> None:
        """A poison ticket: whoever takes it next fails as well."""
        hand: Hand | None = choose(self._busy(), pick)
        while hand is not None:
            self._fail(hand, killed and self._attempts(hand) == MOST_ATTEMPTS - 1)
            known = len(self.hands)
            if self._fresh(hand.stream):
                self._take(*self._worker_of([hand.stream], pick), 100)
            again = [new for new in self.hands[known:] if new.entry.ticket == hand.entry.ticket]
            hand = again[0] if again else None

    @precondition(lambda self: any(hand.entry.doomed for hand in self.hands))
    @rule(pick=PICK)
    def bury(self, pick: int) -> None:
        self._bury(choose([hand for hand in reversed(self.hands) if hand.entry.doomed], pick))

    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        _, worker = choose(self.workers, pick)
        self._agree(worker.leave, self.model.leave)

    # The server

    @precondition(lambda self: self.model.now.places)
    @rule()
    def reach_the_disk(self) -> None:
        """What is on the server now will be there if it is killed later."""
        keys = self.connection.execute("EVAL", DUMP, len(self.keys.all), *self.keys.all)
        self.snapshots.append(Snapshot(keys, deepcopy(self.model.now), frozenset(self.misissued)))

    @precondition(lambda self: self.calm > CALM)
    @rule(
        pick=PICK,
        back_to=st.sampled_from(["any", "any", "oldest", "nothing"]),
        leases_run_out=st.booleans(),
        noticed=st.booleans(),
    )
    def server_is_killed(self, pick: int, back_to: str, leases_run_out: bool, noticed: bool) -> None:
        """It comes back as it was at some earlier time, or as if it never was; maybe only much later.

        The learner may notice it only after its next call.
        """
        nothing, *snapshots = self.snapshots
        snapshot = {"any": choose(snapshots, pick), "oldest": snapshots[0], "nothing": nothing}[back_to]
        self.connection.execute(
            "EVAL", RESTORE, len(self.keys.all), *self.keys.all, *(key or b"" for key in snapshot.keys)
        )
        self.model.now = deepcopy(snapshot.model)
        self.connection.restarts += 1  # so what is lost is not another client's work to the learner
        for stream in WORK:  # whoever saw a lease unchanged before begins anew
            self.ran_out[stream].clear()
            for item in self.model.now.streams[stream]:
                item.late = False
        self.misissued |= snapshot.misissued
        if leases_run_out:
            self._let_leases_run_out(self._leased())
        self.repair_due, self.calm = True, 0
        killed_ms = self._now_ms()
        while self._now_ms() <= killed_ms:
            pass  # coming back takes longer than the millisecond in which an id could be given again
        self._check_server()
        for stream in WORK:
            self._reclaim(*self._worker_of([stream], pick), 100)
        for hand in [hand for hand in self._busy() if self._fresh(hand.stream)][:3]:
            self._bury(hand)  # what the server forgot that it had given: there, and nobody's
        if not noticed:
            self.issue(1)


def test_every_history_is_one_the_model_allows(queue_server: LocalServer) -> None:
    connection = Connection(queue_server.url, 10, 10)
    ProtocolMachine.steps.clear()
    run_state_machine_as_test(
        lambda: ProtocolMachine(connection),
        settings=settings(
            max_examples=LONGER or 340,
            stateful_step_count=STEPS,
            derandomize=not LONGER,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert ProtocolMachine.steps["rules"] >= 10_000, ProtocolMachine.steps
    connection.close()


def test_work_that_is_given_back_after_its_last_attempt_keeps_its_attempts(
    queue_server: LocalServer,
) -> None:
    """Three attempts failed, the last one alone. A lease lost in company changes nothing then."""
    machine = ProtocolMachine(Connection(queue_server.url, 10, 10))
    machine.issue(1)
    machine.take(0, 1)
    machine.kill_every_worker(0, 0, marked=True)
    assert machine.hands[-1].entry.doomed
    machine.give_back(0, sampled=False)
    machine.take(0, 1)
    machine.lose_lease(0, 0, reclaimed=True)
    assert machine.hands[-1].entry.attempts == MOST_ATTEMPTS
    machine.teardown()
    machine.connection.close()
