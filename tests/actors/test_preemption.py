"""What becomes of an actor's work when it has to end: it goes back with its tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actors import ticket_worker
from penstock.actors.held_tickets import HeldTickets, Job
from penstock.actors.partial_groups import Begun, join, kept, read_partial, rest_of, write_partial
from penstock.common.broker.connection import Connection
from penstock.common.broker.costs import LOST_TOKENS
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import Entry
from penstock.common.deadline import GracePeriod
from penstock.common.errors import MalformedMessage
from penstock.common.files.run_folder import RunFolder
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Float32s, Int32s, PartialGroup, Rollout, Span, Ticket, Version
from penstock.common.wire.transcript import Transcript
from tests.actors.conftest import SAMPLING, ActorThread, Run
from tests.actors.test_probing import PROBES
from tests.actors.test_ticket_worker import watch_hand_offs
from tests.common.builders import make_rollout, make_ticket
from tests.fake_engine import EOS, FakeEngine
from tests.helpers import wait_until

StartActor = Callable[..., ActorThread]

LONG = replace(SAMPLING, max_tokens=60)
TICKET = make_ticket(num_generations=3)


def partial_of(a_run: Run) -> bytes:
    """What lies on the only ticket of the run, whose attempts were not raised; b"" for nothing."""
    ((_, fields),) = a_run.connection.execute("XRANGE", a_run.keys.tickets, "-", "+")
    assert fields[b"a"] == b"0"
    return fields.get(b"p", b"")


def preempt(
    a_run: Run, start_actor: StartActor, ticket: Ticket, engine: FakeEngine | None = None
) -> Begun:
    """Let an actor sample some tokens of a ticket and end; return what it gave back."""
    engine = engine or FakeEngine(token_delay_s=0.02)
    actor = start_actor(engine, grace_s=0.1)
    wait_until(lambda: engine.tokens_generated() > 8 * ticket.num_generations, "some tokens")
    actor.stop()
    assert actor.error is None
    assert a_run.pending() == 0
    data = partial_of(a_run)
    return read_partial(data, ticket, episodes=False) if data else ()


def test_another_actor_continues_what_one_that_ends_has_sampled(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    ticket = a_run.ticket(0, num_generations=8, sampling=LONG)
    a_run.issue(ticket)
    begun = preempt(a_run, start_actor, ticket)
    assert {one.finish_reason for one in begun if one} >= {"cut"}

    again = preempt(a_run, start_actor, ticket)  # the second one is told to end as well
    assert sum(len(one.token_ids) for one in again if one) > sum(
        len(one.token_ids) for one in begun if one
    )

    start_actor()
    group = wait_until(lambda: a_run.groups().get("train:0"), "the group")
    for before, rollout in zip(again, group.rollouts, strict=True):
        assert before is not None
        length = len(before.token_ids)
        assert rollout.token_ids[:length].tolist() == before.token_ids.tolist()
        assert rollout.logprobs[:length].tobytes() == before.logprobs.tobytes()
        assert rollout.spans[: len(before.spans)] == before.spans
        assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] == EOS else "length")
        if before.finish_reason != "cut":
            assert len(rollout.token_ids) == length
        else:
            assert [span.actor for span in rollout.spans][-1] == ""
    actors = {span.actor for rollout in group.rollouts for span in rollout.spans}
    assert len(actors) == 3
    assert a_run.connection.execute("HGET", a_run.keys.costs, LOST_TOKENS) is None


class Slow(FakeEngine):
    """An engine that a request reaches a while after it was made: the first abort finds none."""

    async def abort(self, request_id: str) -> None:
        if request_id in self.missed:
            await super().abort(request_id)
        self.missed.add(request_id)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.missed: set[str] = set()


def test_a_request_that_reaches_the_engine_after_its_abort_is_aborted_too(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    ticket = a_run.ticket(0, num_generations=8, sampling=LONG)
    a_run.issue(ticket)
    begun = preempt(a_run, start_actor, ticket, Slow(token_delay_s=0.05))
    assert sum(len(one.token_ids) for one in begun if one) > 64


def test_what_is_finished_within_the_grace_period_is_handed_over(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0)
    a_run.issue(a_run.ticket(0, sampling=LONG))
    engine = FakeEngine(token_delay_s=0.01)
    actor = start_actor(engine, grace_s=60.0)
    wait_until(lambda: engine.tokens_generated() > 8, "some tokens")
    actor.stop()
    assert list(a_run.groups()) == ["train:0"]


def test_a_ticket_goes_back_without_tokens_that_are_over_the_limit(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.contract = replace(a_run.contract, largest_group=200)
    a_run.queue.publish_contract(encode(a_run.contract))
    a_run.announce(0)
    ticket = a_run.ticket(0, sampling=LONG)
    a_run.issue(ticket)
    assert preempt(a_run, start_actor, ticket) == ()
    assert int(float(a_run.connection.execute("HGET", a_run.keys.costs, LOST_TOKENS))) > 8


class Unproven(FakeEngine):
    """An engine that scores no probe while `holding`."""

    holding = False

    async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
        while self.holding:
            await asyncio.sleep(0.01)
        return await super().score(request_id, token_ids)


def test_a_ticket_goes_back_also_while_the_weights_it_was_sampled_with_are_not_proven(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_worker, "_STORE_S", 0.2)
    engine = Unproven(token_delay_s=0.02)
    a_run.announce(0, probes=PROBES)
    actor = start_actor(engine, grace_s=0.1)
    wait_until(lambda: len(engine.scored) == 2, "the first proof")
    engine.holding = True
    a_run.announce(1, probes=PROBES)
    wait_until(lambda: engine.loads == 2, "the next version")
    a_run.issue(a_run.ticket(0, sampling=LONG), a_run.ticket(1, sampling=replace(LONG, max_tokens=1)))
    wait_until(lambda: engine.tokens_generated() > 16, "tokens of both")
    actor.stopping.set()
    wait_until(lambda: a_run.pending() == 0, "the tickets' return")
    assert actor.thread.is_alive()  # it waits for the engine's proof
    engine.holding = False
    actor.wait()
    assert actor.error is None
    again = a_run.stream("other").take(10)
    assert {(entry.ticket, entry.attempts) for entry in again} == {("train:0", 0), ("train:1", 0)}
    assert not any(entry.partial for entry in again)
    lost = int(float(a_run.connection.execute("HGET", a_run.keys.costs, LOST_TOKENS)))
    assert lost == engine.tokens_generated()


def test_an_actor_that_ends_waits_for_a_server_that_comes_back(
    private_server: LocalServer, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch_hand_offs(monkeypatch)
    connection = Connection(private_server.url, 10, 10)
    a_run = Run(connection, Keys(run_name), tmp_path, RunFolder(tmp_path / run_name))
    a_run.announce(0)
    ticket = a_run.ticket(0, num_generations=8, sampling=LONG)
    a_run.issue(ticket)
    engine = FakeEngine(token_delay_s=0.02)
    actor = ActorThread(private_server.url, run_name, tmp_path, engine, grace_s=60.0)
    wait_until(lambda: engine.tokens_generated() > 8, "some tokens")
    private_server.kill()
    actor.stopping.set()
    wait_until(lambda: calls, "a hand-off, which fails meanwhile")
    private_server.start()
    actor.wait()
    assert actor.error is None
    assert list(a_run.groups()) == ["train:0"]
    connection.close()


def test_an_actor_that_holds_nothing_does_not_wait_for_a_server() -> None:
    stopping, held = threading.Event(), HeldTickets(4)
    grace = GracePeriod(stopping, held, 60.0)
    assert not grace.is_set()
    stopping.set()
    assert grace.is_set()
    held.add(Job(None, Entry("1-0", "train:0", b""), TICKET, alone=False))  # type: ignore[arg-type]
    assert not grace.is_set()
    assert 59.0 < grace.left_s() <= 60.0
    assert GracePeriod(stopping, held, 1.0).is_set()


def large() -> bytes:
    """A partial group of the ticket, well formed, of over 1500 bytes."""
    spans = tuple(Span(Version(1, 0), at, at + 1, "h" * 64, "actor-1") for at in range(7))
    return encode(PartialGroup(TicketId.train(0), (cut(7, spans=spans),) * 4))


OTHER = encode(PartialGroup(TicketId.train(1), (None,) * 4))


@pytest.mark.parametrize("kind", ["junk", "another ticket's", "large"])
def test_a_ticket_with_a_malformed_partial_group_begins_anew(
    a_run: Run, start_actor: StartActor, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    data = {"junk": b"junk", "another ticket's": OTHER, "large": large()}[kind]
    a_run.contract = replace(a_run.contract, largest_group=1500)
    a_run.queue.publish_contract(encode(a_run.contract))
    a_run.announce(0)
    a_run.issue(a_run.ticket(0))
    other = a_run.stream("other")
    assert other.give_back(other.take(1)[0], data)
    actor = start_actor()
    wait_until(lambda: "train:0" in a_run.groups(), "the group")
    assert all("#" not in request for request in actor.engine.requests)
    assert "begins anew" in capsys.readouterr().out


def test_a_last_attempt_begins_anew(a_run: Run, start_actor: StartActor) -> None:
    a_run.announce(0)
    ticket = a_run.ticket(0)
    a_run.issue(ticket)
    other = a_run.stream("other")
    for _ in range(2):
        other.fail(other.take(1)[0], "train", "the engine died")
    data = write_partial(ticket, (cut(),) * ticket.num_generations, "actor-1")
    assert other.give_back(other.take(1)[0], data)
    actor = start_actor()
    wait_until(lambda: "train:0" in a_run.groups(), "the group")
    assert all("#" not in request for request in actor.engine.requests)


def cut(length: int = 3, **changes: Any) -> Rollout:
    """A rollout that another actor was sampling."""
    one = make_rollout(length)
    named = tuple(replace(span, actor="actor-1") for span in one.spans)
    return replace(one, **({"spans": named, "finish_reason": "cut"} | changes))


def test_a_partial_group_comes_back_as_it_was() -> None:
    begun = (cut(), None, cut(5, finish_reason="stop"))
    unnamed = replace(cut(), spans=make_rollout(3).spans)
    found = read_partial(write_partial(TICKET, (unnamed, *begun[1:]), "actor-1"), TICKET, False)
    assert encode(found[0]) == encode(begun[0])
    assert found[1] is None
    assert encode(found[2]) == encode(begun[2])


OLD = (Span(Version(1, 0), 0, 3, "h", "actor-1"),)
REFUSED = {
    "another ticket": (replace(TICKET, id=TicketId.train(8)), cut()),
    "too many": (TICKET, cut(17)),
    "nothing left": (TICKET, cut(16)),
    "too old": (replace(TICKET, version=Version(1, 2), min_step=1), cut(spans=OLD)),
    "another version": (
        replace(TICKET, id=TicketId.evaluation(Version(1, 0), 7), purpose="eval", version=Version(1, 0)),
        cut(),
    ),
    "a structure": (replace(TICKET, sampling=replace(TICKET.sampling, regex="[0-9]+")), cut()),
    "a conversation": (TICKET, cut(finish_reason="stop", transcript=Transcript())),
    "turns": (TICKET, cut(finish_reason="turns")),
}


@pytest.mark.parametrize(("ticket", "rollout"), REFUSED.values(), ids=REFUSED)
def test_what_no_actor_gives_back_is_refused(ticket: Ticket, rollout: Rollout) -> None:
    name = ticket.id if ticket.purpose == "eval" else TICKET.id
    data = encode(PartialGroup(name, (rollout, None, None)))
    with pytest.raises(MalformedMessage, match="the partial group of"):
        read_partial(data, ticket, episodes=False)
    if ticket is TICKET and rollout.finish_reason != "cut":
        assert read_partial(data, ticket, episodes=True)


def test_another_number_of_rollouts_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="2 rollouts of 3"):
        read_partial(encode(PartialGroup(TICKET.id, (None, None))), TICKET, episodes=False)


def test_the_rest_has_the_tokens_so_far_as_its_prompt_and_another_seed() -> None:
    ids, sampling = rest_of(TICKET, 1, cut(5))
    assert ids.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    assert sampling.max_tokens == 11
    assert sampling.seed not in range(42, 45)
    assert rest_of(TICKET, 1, None)[1] == replace(TICKET.sampling, seed=43)
    assert rest_of(TICKET, 1, cut(6))[1].seed != sampling.seed != rest_of(TICKET, 2, cut(5))[1].seed


def test_completions_with_a_structure_are_kept_only_if_they_are_finished() -> None:
    sampling = replace(TICKET.sampling, choice=("yes", "no"))
    begun = (cut(), None, cut(finish_reason="stop"))
    assert kept(begun, sampling) == (None, None, begun[2])
    assert kept(begun, TICKET.sampling) == begun


def spell(ids: np.ndarray) -> str:
    """Token 0 is a, 1 is b, and so on."""
    return "".join(chr(ord("a") + token) for token in ids.tolist())


@pytest.mark.parametrize(
    ("stop", "length", "reason"),
    [
        ((), 8, "length"),
        (("zz",), 8, "length"),
        (("ca",), 4, "stop"),  # tokens 2 and 3, one of each actor
        (("bcab",), 5, "stop"),
        (("e",), 8, "stop"),  # the last token
    ],
)
def test_a_stop_string_across_the_break_ends_the_completion(
    stop: tuple[str, ...], length: int, reason: str
) -> None:
    rest = replace(make_rollout(5), finish_reason="length", logprobs=np.full(5, -2.0, dtype="<f4"))
    whole = join(cut(3), rest, stop, spell)
    assert spell(whole.token_ids) == "abcabcde"[:length]
    assert whole.finish_reason == reason
    assert whole.logprobs.tolist() == ([-0.5] * 3 + [-2.0] * 5)[:length]
    assert len(whole.logprobs) == len(whole.mask) == whole.spans[-1].end == length
    assert [span.actor for span in whole.spans][:2] == ["actor-1"] * 2
    assert {span.actor for span in whole.spans[2:]} == {""}
