"""The actor's loop with a fake engine and a real queue server."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
from blake3 import blake3

from penstock.actors import ticket_worker
from penstock.actors.held_tickets import HeldTickets
from penstock.actors.weights.follower import WeightFollower
from penstock.common.broker.run_view import RunView
from penstock.common.broker.work_stream import WorkStream
from penstock.common.errors import ConfigError, DeadlineExceeded, EngineFailed, RunNotReady
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.common.wire.messages import Rollout, Span, Version
from tests.actors.conftest import LEASE_S, SAMPLING, ActorThread, Run
from tests.fake_engine import FakeEngine, draw_tokens
from tests.helpers import Clock, wait_until

POISON = np.array([1, 99], dtype="<i4")

StartActor = Callable[..., ActorThread]


def test_a_ticket_becomes_a_group_on_rollouts(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(20)))
    start_actor()
    groups = wait_until(lambda: len(a_run.groups()) == 20 and a_run.groups(), "20 groups")
    group = groups["train:3"]
    assert len(group.rollouts) == 4
    for index, rollout in enumerate(group.rollouts):
        assert rollout.token_ids.tolist() == draw_tokens(SAMPLING, index).tolist()
        digest = blake3(b"weights 0").hexdigest()
        assert rollout.spans == (Span(Version(1, 0), 0, len(rollout.token_ids), digest),)
    assert a_run.pending() == 0


def test_an_actor_whose_episodes_may_not_open_enough_files_ends_at_its_start(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: getattr(a_run.contract, name) for name in Contract.__slots__}
    spec = EpisodeSpec(agent=OwnCode("rollout", "agent.py", ""))
    a_run.queue.publish_contract(encode(Contract(**(values | {"episodes": spec}))))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 300))
    actor = start_actor()
    actor.wait()
    assert isinstance(actor.error, ConfigError)
    assert "hard limit is 300" in str(actor.error)
    assert "lower ACTOR_EPISODE_WORKERS" in str(actor.error)


class EndsTogether(FakeEngine):
    """Four groups end in the same instant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sampled = 0
        self._all_sampled = asyncio.Event()

    async def generate(self, *request: Any) -> tuple[Rollout, ...]:
        rollouts = await super().generate(*request)
        self._sampled += 1
        if self._sampled == 4:
            self._all_sampled.set()
        await self._all_sampled.wait()
        return rollouts


def watch_hand_offs(monkeypatch: pytest.MonkeyPatch, takes_s: float = 0.0) -> list[list[str]]:
    """The tickets of each call, which takes a while."""
    calls: list[list[str]] = []
    original = WorkStream.handoff_all

    def watched(self: WorkStream, finished: list, destination: str) -> list[bool]:
        calls.append(sorted(entry.ticket for entry, _ in finished))
        time.sleep(takes_s)
        return original(self, finished, destination)

    monkeypatch.setattr(WorkStream, "handoff_all", watched)
    return calls


def test_what_ends_together_is_handed_off_together(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch_hand_offs(monkeypatch)
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(4)))
    start_actor(EndsTogether(slots=1000))
    wait_until(lambda: len(a_run.groups()) == 4, "4 groups")
    assert calls == [["train:0", "train:1", "train:2", "train:3"]]


def test_what_ends_during_a_hand_off_goes_together_with_the_next(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch_hand_offs(monkeypatch, takes_s=0.2)
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(8)))
    start_actor(FakeEngine(slots=1000))
    wait_until(lambda: len(a_run.groups()) == 8, "8 groups")
    wait_until(lambda: a_run.pending() == 0, "nothing in hand")
    sizes = [len(tickets) for tickets in calls]
    assert sum(sizes) == 8
    assert max(sizes) > 1


def test_no_more_is_taken_than_there_is_room_for(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(12)))
    engine = FakeEngine(slots=12, token_delay_s=0.02)
    start_actor(engine)
    wait_until(lambda: len(a_run.groups()) == 12, "12 groups")
    assert engine.most_at_once == 3


def test_the_next_ticket_is_taken_as_soon_as_a_group_is_sampled(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_worker, "_IDLE_S", 3.0)
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(30)))
    start_actor(FakeEngine(slots=4, token_delay_s=0.002))
    wait_until(lambda: len(a_run.groups()) == 30, "30 groups", 20)


def test_the_share_of_the_credit_bounds_what_one_actor_holds(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number, min_step=1) for number in range(12)))
    start_actor(FakeEngine(slots=1000))
    held = [0]

    def most() -> int:
        held.append(a_run.pending())
        return max(held)

    wait_until(lambda: most() == a_run.contract.credit, "as many as the credit")
    a_run.announce(1)
    wait_until(lambda: most() and len(a_run.groups()) == 12, "12 groups")
    assert most() == a_run.contract.credit


def test_min_step_is_waited_for(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, min_step=1), a_run.ticket(1))
    actor = start_actor()
    wait_until(lambda: "train:1" in a_run.groups(), "the ticket that need not wait")
    assert "train:0" not in a_run.groups()
    a_run.announce(1)
    group = wait_until(lambda: a_run.groups().get("train:0"), "the ticket that waited")
    assert {span.version for rollout in group.rollouts for span in rollout.spans} == {Version(1, 1)}
    assert actor.engine.taken == [Version(1, 0), Version(1, 1)]


def test_tickets_for_weights_that_this_actor_cannot_get_go_to_others(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_worker, "_BEHIND_S", 1.0)
    a_run.announce(0)
    actor = start_actor(join_timeout_s=60.0)
    wait_until(lambda: actor.engine.version, "the first version")
    a_run.announce(1, wrong=True)
    a_run.issue(a_run.ticket(0, min_step=1))
    wait_until(a_run.pending, "the actor to hold the ticket")
    (fields,) = wait_until(a_run.waiting, "the ticket to be given back")
    assert int(fields.get(b"a", 0)) == 0
    time.sleep(0.5)
    assert a_run.pending() == 0  # it takes none while it cannot have the weights
    a_run.announce(1)
    wait_until(lambda: "train:0" in a_run.groups(), "the ticket, once the weights are there")


def forge(a_run: Run, number: int) -> str:
    """A ticket of a version that never comes, added by another client; returns its place."""
    far = 10**15 - 1
    ticket = a_run.ticket(number, version=Version(1, far), min_step=far)
    key = a_run.keys.tickets
    entry = a_run.connection.execute("XADD", key, "*", "t", ticket.id, "d", encode(ticket))
    return f"{key}|{entry.decode()}|1.0"


def test_forged_tickets_are_not_held(a_run: Run, start_actor: StartActor) -> None:
    """Held until their version comes, as many as the credit would keep the actor from all others."""
    a_run.announce(0)
    for number in range(20):
        forge(a_run, number)
    a_run.issue(a_run.ticket(99))
    start_actor()
    wait_until(lambda: "train:99" in a_run.groups(), "the ticket behind them")
    wait_until(lambda: a_run.pending() == 0, "nothing in hand")
    assert list(a_run.groups()) == ["train:99"]


def test_a_forged_ticket_as_another_tickets_place_is_deleted(
    a_run: Run, start_actor: StartActor
) -> None:
    """The learner issues the ticket again; attempts at it would end it as dead in an instant."""
    a_run.announce(0)
    a_run.connection.execute("HSET", a_run.keys.open, "train:0", forge(a_run, 0))
    start_actor()
    view = RunView(a_run.connection, a_run.keys)
    wait_until(
        lambda: view.malformed() == {"another ticket or version than its place's": 1}, "the count"
    )
    assert not a_run.verdicts()
    a_run.issue(a_run.ticket(0))
    wait_until(a_run.groups, "its group")


DELETED = {
    "contract": ("DEL", "contract"),
    "fence": ("DEL", "fence"),
    "group": ("XGROUP", "DESTROY", "tickets", "workers"),
}


@pytest.mark.parametrize("name", DELETED)
def test_what_another_client_deleted_costs_no_attempt_and_no_token(
    a_run: Run, start_actor: StartActor, name: str
) -> None:
    engine = FakeEngine(token_delay_s=0.5)
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number) for number in range(4)))
    start_actor(engine)
    wait_until(lambda: engine.tokens_generated() >= 16, "a token of each completion")
    words = [getattr(a_run.keys, word, word) for word in DELETED[name]]
    a_run.connection.execute(*words)
    wait_until(lambda: len(engine.aborted) >= 4 and not engine._in_flight, "the abort of all")
    a_run.queue.beat(30.0, "busy")
    if name != "group":
        found = wait_until(a_run.waiting, "the tickets to be back")
        assert {fields.get(b"a", b"0") for fields in found} == {b"0"}
        assert all(fields[b"p"] for fields in found)
    a_run.queue.restore()
    wait_until(lambda: len(a_run.groups()) == 4, "four groups")
    continued = [request for request in engine.requests if "#" in request]
    assert bool(continued) == (name != "group")  # without a group nothing can be put back


def test_waiting_tickets_do_not_keep_the_engine_from_one_that_can_start(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(*(a_run.ticket(number, min_step=1) for number in range(4)), a_run.ticket(9))
    start_actor(FakeEngine(slots=8))
    wait_until(lambda: list(a_run.groups()) == ["train:9"], "the ticket behind them")


def test_an_eval_ticket_waits_for_exactly_its_version(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.eval_ticket(0, step=1), a_run.ticket(0))
    actor = start_actor()
    wait_until(lambda: "train:0" in a_run.groups(), "a train ticket meanwhile")
    a_run.announce(2)
    wait_until(lambda: actor.engine.version == Version(1, 2), "version 1.2")
    assert list(a_run.groups()) == ["train:0"]
    a_run.announce(1)
    group = wait_until(lambda: a_run.groups().get("eval:1.1:0"), "the eval ticket")
    assert {span.version for span in group.rollouts[0].spans} == {Version(1, 1)}


def test_weights_are_not_taken_while_an_eval_ticket_is_sampled(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(*(a_run.eval_ticket(number, step=0) for number in range(3)))
    engine = FakeEngine(token_delay_s=0.1)
    start_actor(engine)
    wait_until(lambda: engine.requests, "a request in flight")
    a_run.announce(1)
    wait_until(lambda: len(a_run.groups()) == 3, "the eval tickets")
    for group in a_run.groups().values():
        assert {span.version for span in group.rollouts[0].spans} == {Version(1, 0)}
    wait_until(lambda: engine.version == Version(1, 1), "version 1.1 afterwards")


def test_a_withdrawn_eval_ticket_is_dropped(a_run: Run, start_actor: StartActor) -> None:
    """Beside a group that runs, tickets that wait take the place of the next one."""
    a_run.announce(0)
    tickets = [a_run.eval_ticket(number, step=5) for number in range(8)]
    a_run.issue(*tickets)
    engine = FakeEngine(slots=8, token_delay_s=0.1)
    start_actor(engine)
    wait_until(lambda: a_run.pending("eval") == 8, "as many as there is room for")
    a_run.queue.close("eval", {ticket.id: "unused" for ticket in tickets})
    a_run.issue(*(a_run.ticket(number) for number in range(30)))
    wait_until(lambda: engine.most_at_once == 2, "room for two groups")


def test_version_spans_survive_a_swap_in_flight(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, sampling=SAMPLING, num_generations=16))
    engine = FakeEngine(token_delay_s=0.3)
    start_actor(engine)
    wait_until(lambda: engine.tokens_generated() >= 32, "two tokens of each")
    a_run.announce(1)
    group = wait_until(lambda: a_run.groups().get("train:0"), "the group")
    longest = max(group.rollouts, key=lambda rollout: len(rollout.token_ids))
    assert [span.version for span in longest.spans] == [Version(1, 0), Version(1, 1)]


def test_a_request_whose_lease_is_lost_is_aborted_and_not_handed_off(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, prompt_ids=POISON))
    engine = FakeEngine(poison=99, misbehaviour="hang")
    actor = start_actor(engine)
    wait_until(lambda: engine.requests, "the request in flight")
    other = a_run.stream("another", lease_s=0.001)
    entry = wait_until(lambda: other.reclaim(1), "the other actor's claim")[0]
    wait_until(lambda: engine.aborted == engine.requests, "the abort")
    actor.stop()
    assert other.renew([entry.id]) == [True]
    assert a_run.groups() == {}


class Gated(FakeEngine):
    """The first request ends once `gate` is open, and fills the engine until then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Event()

    async def generate(self, *request: Any) -> tuple[Rollout, ...]:
        rollouts = await super().generate(*request)
        while not self.gate.is_set():
            await asyncio.sleep(0.01)
        return rollouts

    def room(self) -> int:
        return super().room() if self.gate.is_set() or not self.requests else 0


def test_a_full_actor_sees_a_lease_expire_and_takes_that_ticket_before_new_ones(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0))
    assert a_run.stream("silent").take(1)
    a_run.issue(a_run.ticket(1), a_run.ticket(2))
    engine = Gated(slots=4)
    start_actor(engine)
    wait_until(lambda: engine.requests, "an actor without room")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 4 * LEASE_S, "the silent actor's lease to be over")
    engine.gate.set()
    wait_until(lambda: len(a_run.groups()) == 3, "3 groups")
    assert [request.split("/")[0] for request in engine.requests] == ["train:1", "train:0", "train:2"]


@pytest.mark.parametrize("stall_timeout_s", [60.0, 0.5], ids=["", "for longer than an engine may hang"])
def test_a_finished_group_is_not_taken_away_while_the_server_has_no_room(
    a_run: Run, start_actor: StartActor, stall_timeout_s: float
) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0))
    unlucky = a_run.stream("unlucky")
    for _ in range(2):
        unlucky.fail(unlucky.take(1)[0], "train", "no luck")
    engine = FakeEngine(token_delay_s=0.05)
    other = a_run.stream("another")
    try:
        start_actor(engine, stall_timeout_s=stall_timeout_s)
        wait_until(lambda: engine.requests, "the last attempt, alone")
        a_run.connection.execute("CONFIG", "SET", "maxmemory", 1)
        ends = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < ends:
            assert other.reclaim(1) == []
            time.sleep(0.02)
    finally:
        a_run.connection.execute("CONFIG", "SET", "maxmemory", 0)
    wait_until(lambda: list(a_run.groups()) == ["train:0"], "the group")
    assert a_run.verdicts() == {}


def test_the_last_attempt_runs_alone(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(2))
    unlucky = a_run.stream("unlucky")
    for _ in range(2):
        unlucky.fail(unlucky.take(1)[0], "train", "no luck")
    a_run.issue(*(a_run.ticket(number) for number in (0, 1, 3, 4, 5)))
    together: dict[str, int] = {}

    class Watching(FakeEngine):
        async def _sample(self, request_id: str, *rest):  # type: ignore[no-untyped-def]
            together[request_id.partition("/")[0]] = len(self._in_flight)
            return await super()._sample(request_id, *rest)

    start_actor(Watching(token_delay_s=0.01))
    wait_until(lambda: len(a_run.groups()) == 6, "6 groups")
    assert together["train:2"] == 1
    assert max(together.values()) > 1


def test_a_prompt_the_engine_refuses_fails_that_ticket_alone(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, prompt_ids=POISON), *(a_run.ticket(n) for n in range(1, 6)))
    engine = FakeEngine(poison=99, misbehaviour="refuse")
    actor = start_actor(engine)
    verdict = wait_until(lambda: a_run.verdicts().get("train:0"), "the verdict")
    assert (verdict.state, "refused" in verdict.reason) == ("dead", True)
    wait_until(lambda: len(a_run.groups()) == 5, "the others")
    assert sum("train:0" in request for request in engine.requests) == 3
    assert actor.thread.is_alive()


def test_a_ticket_that_cannot_be_read_is_buried(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.queue.issue("train", [("train:0", Version(1, 0), b"nonsense")])
    start_actor()
    verdict = wait_until(lambda: a_run.verdicts().get("train:0"), "the verdict")
    assert "8 bytes are not msgpack of plain data" in verdict.reason


def test_a_poison_prompt_is_buried_and_takes_nobody_along(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, prompt_ids=POISON), *(a_run.ticket(n) for n in range(1, 6)))
    actor = None
    for _ in range(3):
        actor = start_actor(FakeEngine(poison=99, token_delay_s=0.01))
        actor.wait()
        assert isinstance(actor.error, EngineFailed)
    start_actor(FakeEngine(poison=99))
    verdict = wait_until(lambda: a_run.verdicts().get("train:0"), "the verdict")
    assert verdict.reason == "lost its lease while running alone"
    wait_until(lambda: len(a_run.groups()) == 5, "the others")


def test_a_hung_engine_ends_the_actor(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, prompt_ids=POISON))
    actor = start_actor(FakeEngine(poison=99, misbehaviour="hang"), stall_timeout_s=0.5)
    actor.wait()
    assert isinstance(actor.error, EngineFailed)
    assert "sampled no token" in str(actor.error)


def test_wrong_weights_are_refused_and_the_old_version_goes_on(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    actor = start_actor()
    wait_until(lambda: actor.engine.version == Version(1, 0), "the first version")
    a_run.announce(1, wrong=True)
    a_run.issue(a_run.ticket(0))
    group = wait_until(lambda: a_run.groups().get("train:0"), "a group")
    assert group.rollouts[0].spans[0].version == Version(1, 0)
    a_run.announce(2)
    wait_until(lambda: actor.engine.version == Version(1, 2), "the next version")


def test_a_stopped_actor_gives_back_what_it_has_not_begun(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0), a_run.ticket(1, min_step=1))
    engine = FakeEngine(token_delay_s=0.1)
    actor = start_actor(engine)
    wait_until(lambda: engine.requests and a_run.pending() == 2, "both tickets taken")
    actor.stop()
    assert actor.error is None
    assert list(a_run.groups()) == ["train:0"]
    assert a_run.pending() == 0
    assert [entry.ticket for entry in a_run.stream("next").take(5)] == ["train:1"]


def test_the_end_of_the_run_ends_the_actor(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    actor = start_actor()
    wait_until(lambda: actor.engine.version, "the first version")
    a_run.queue.set_state("ended")
    actor.wait()
    assert actor.error is None


def test_an_actor_that_joins_an_ended_run_waits_for_the_learner_that_goes_on_with_it(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.queue.set_state("ended")
    with structlog.testing.capture_logs() as logs:
        actor = start_actor()
        wait_until(lambda: logs or not actor.thread.is_alive(), "it to look")
        a_run.queue.beat(30.0, "reading data and model")
        a_run.queue.set_state("running")
        a_run.issue(a_run.ticket(1))
        wait_until(lambda: a_run.groups() or not actor.thread.is_alive(), "a group")
    assert a_run.groups()


def test_an_actor_that_waits_for_an_ended_run_to_go_on_can_be_stopped(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.queue.set_state("ended")
    with structlog.testing.capture_logs() as logs:
        actor = start_actor(join_timeout_s=3600.0)
        wait_until(lambda: logs, "it to wait")
        actor.stop()
    assert actor.error is None
    assert actor.engine.version is None


def test_a_group_over_the_bound_of_the_contract_is_dead(a_run: Run, start_actor: StartActor) -> None:
    a_run.contract = replace(a_run.contract, largest_group=500)
    a_run.queue.publish_contract(encode(a_run.contract))
    a_run.announce(0)
    a_run.issue(a_run.ticket(0))
    start_actor()
    verdict = wait_until(lambda: a_run.verdicts().get("train:0"), "the verdict")
    assert verdict.state == "dead"
    assert "but the run takes at most 500 (LEARNER_MAX_GROUP_MIB)" in verdict.reason


def test_another_contract_ends_the_actor_with_the_difference(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    actor = start_actor()
    wait_until(lambda: actor.engine.version, "the first version")
    values = {name: getattr(a_run.contract, name) for name in Contract.__slots__}
    a_run.queue.publish_contract(encode(Contract(**(values | {"groups_per_step": 5}))))
    actor.wait()
    assert isinstance(actor.error, RunNotReady)
    assert "groups_per_step: 4 -> 5" in str(actor.error)


def test_an_actor_without_a_learner_gives_up_and_says_so(start_actor: StartActor) -> None:
    actor = start_actor(join_timeout_s=0.5)
    actor.wait()
    assert isinstance(actor.error, DeadlineExceeded)
    assert "no learner set up the run" in str(actor.error)


def test_an_actor_leaves_a_learner_that_gives_no_sign_of_life(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, min_step=1))
    actor = start_actor(progress_timeout_s=0.5)
    actor.wait()
    assert isinstance(actor.error, DeadlineExceeded)
    told = str(actor.error)
    assert "the learner is test (incarnation 1), weights 1.0 are announced; actor-" in told
    assert " holds 1 ticket since " in told


def test_the_first_weights_may_be_long_in_coming_while_the_learner_lives(
    a_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("penstock.common.deadline.time", clock)
    view = RunView(a_run.connection, a_run.keys)
    follower = WeightFollower(
        FakeEngine(),
        view,
        HeldTickets(8),
        a_run.weight_source(),
        learner_timeout_s=6.0,
        take_timeout_s=5.0,
    )
    for number in range(3):
        a_run.queue.beat(30.0, f"reading checkpoint {number}")
        assert not asyncio.run(follower.poll())
        clock.now += 4.0
        assert not asyncio.run(follower.poll())
    clock.now += 4.0
    with pytest.raises(DeadlineExceeded, match=r"no heartbeat came for .* the learner is test"):
        asyncio.run(follower.poll())


@pytest.mark.parametrize("lost", ["contract", "everything"])
def test_an_emptied_server_is_waited_for_with_the_same_engine(
    a_run: Run, start_actor: StartActor, lost: str
) -> None:
    a_run.announce(0)
    actor = start_actor()
    wait_until(lambda: actor.engine.version, "the first version")
    a_run.connection.execute(
        "DEL", *(a_run.keys.all if lost == "everything" else ()), a_run.keys.contract
    )
    a_run.__post_init__()
    a_run.announce(0)
    a_run.issue(a_run.ticket(0))
    wait_until(a_run.groups, "a group after the loss")
    assert actor.thread.is_alive()
