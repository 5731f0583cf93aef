"""Groups that are no answer to what the learner asked and published are refused, for a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.work_stream import Entry
from penstock.common.errors import MalformedMessage, NoSignal, RunTaken
from penstock.common.wire.codec import decode_outcome, encode, pack, unpack
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import ScoredGroup, Verdict
from penstock.learner.report.metrics import group_metrics
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.intake import Intake
from penstock.learner.streams.refusal import MEANING, OutcomeCheck, Reason
from tests.common.builders import make_span
from tests.learner.builders import make_group, make_plan
from tests.learner.test_flow import Bench
from tests.learner.test_intake import Desk
from tests.learner.whole import WEIGHTS_HASH, Run

TICKET = TicketId.train(0)
ISSUED = Version(1, 3)
EVALUATED = Version(1, 5)

Forge = Callable[[ScoredGroup], ScoredGroup]


def of_ticket(**changes: Any) -> Forge:
    """Change fields of the ticket."""
    return lambda made: replace(
        made, group=replace(made.group, ticket=replace(made.group.ticket, **changes))
    )


def of_sampling(**changes: Any) -> Forge:
    """Change fields of the ticket's sampling."""
    return lambda made: of_ticket(sampling=replace(made.group.ticket.sampling, **changes))(made)


def of_rollouts(**changes: Any) -> Forge:
    """Change fields of the last rollout."""
    return lambda made: replace(
        made,
        group=replace(
            made.group, rollouts=(*made.group.rollouts[:-1], replace(made.group.rollouts[-1], **changes))
        ),
    )


def spans(*versions: Version, digest: str = "") -> Forge:
    """Change the versions of the last rollout's three tokens."""
    ends = [3] if len(versions) == 1 else [1, 3]
    starts = [0, *ends]
    made = tuple(make_span(v, a, b, digest) for v, a, b in zip(versions, starts, ends, strict=False))
    return of_rollouts(spans=made)


def one_more(made: ScoredGroup) -> ScoredGroup:
    """A rollout more than asked for, with its reward."""
    group = made.group
    ticket = replace(group.ticket, num_generations=group.ticket.num_generations + 1)
    group = replace(group, ticket=ticket, rollouts=(*group.rollouts, group.rollouts[0]))
    rewards = {name: (*values, 1.0) for name, values in made.rewards.items()}
    return replace(made, group=group, rewards=rewards, texts=(*made.texts, "x"))


FORGERIES: list[tuple[Reason, Forge]] = [
    ("contract", of_ticket(contract="another")),
    ("prompt", of_ticket(prompt_ids=np.array([2**31 - 1], "<i4"))),
    ("prompt", of_ticket(prompt_ids=np.array([3], "<i4"))),
    ("columns", of_ticket(columns={"answer": "another"})),
    ("columns", of_ticket(columns={})),
    ("columns", lambda made: of_ticket(columns=made.group.ticket.columns | {"solution": "7"})(made)),
    ("sampling", of_sampling(temperature=0.3)),
    ("sampling", of_sampling(seed=1)),
    ("sampling", of_sampling(top_p=0.5)),
    ("sampling", of_sampling(max_tokens=7)),
    ("generations", one_more),
    ("issue", of_ticket(version=Version(1, 2), min_step=2)),
    ("issue", of_ticket(min_step=0)),
    ("rewards", lambda made: replace(made, rewards={"other": next(iter(made.rewards.values()))})),
    ("rewards", lambda made: replace(made, rewards=made.rewards | {"b": made.rewards["accuracy"]})),
    ("version", spans(Version(1, 6))),
    ("version", spans(Version(1, 10**9))),
    ("version", spans(Version(0, 5))),
    ("version", spans(Version(2, 5))),
    ("version", spans(Version(1, 2))),  # published, and older than the ticket
    ("version", spans(Version(1, 5), Version(3, 0))),
    ("hash", spans(Version(1, 5), digest="ff" * 32)),
    ("hash", spans(Version(1, 5), digest="no hash")),
    ("tokens", of_rollouts(token_ids=np.array([3, 32, 3], "<i4"))),
    (
        "tokens",
        of_rollouts(
            token_ids=np.full(9, 3, "<i4"),
            logprobs=np.full(9, -1.0, "<f4"),
            mask=np.ones(9, "|b1"),
            spans=(make_span(EVALUATED, 0, 9),),
        ),
    ),
]


@pytest.fixture
def desk() -> Desk:
    """A desk with an open ticket of 1.3; 1.0 to 1.5 are published."""
    desk = Desk()
    desk.issue(1, step=3)
    desk.ledger.versions = {v: h for v, h in desk.ledger.versions.items() if v.step <= 5}
    return desk


def good_group(desk: Desk) -> ScoredGroup:
    return make_group(desk.plan.source.train(TICKET, ISSUED), spans=[(5, 3)])


def fold(desk: Desk, data: bytes) -> list[str]:
    """The state and the reason with which the ticket ends; [] if its group is held."""
    desk.intake.fold(Entry("1-1", TICKET, data))
    return desk.ledger.take_unrecorded().get(TICKET, [])


def test_a_group_as_asked_for_is_held(desk: Desk) -> None:
    assert fold(desk, encode(good_group(desk))) == []
    assert TICKET in desk.intake.held


@pytest.mark.parametrize(("reason", "forge"), FORGERIES)
def test_a_forged_group_ends_stale_and_is_counted(desk: Desk, reason: Reason, forge: Forge) -> None:
    assert fold(desk, encode(forge(good_group(desk)))) == ["stale", f"refused: {MEANING[reason]}"]
    arrivals = desk.intake.take_arrivals()
    assert (arrivals.stale, arrivals.foreign, dict(arrivals.refused)) == (1, 0, {reason: 1})
    assert group_metrics([good_group(desk)], arrivals, {"accuracy": 1.0})[f"refused/{reason}"] == 1
    assert desk.intake.take_arrivals().refused == {}


@pytest.mark.parametrize("answer", ["group", "verdict"])
def test_an_answer_to_another_ticket_is_refused(desk: Desk, answer: str) -> None:
    other = TicketId.train(1)
    group = make_group(desk.plan.source.train(other, ISSUED), spans=[(5, 3)])
    verdict = Verdict(other, "filtered", "no spread", {"accuracy": (0.0, 0.0)}, (3, 3))
    found = fold(desk, encode(group if answer == "group" else verdict))
    assert found == ["stale", f"refused: {MEANING['ticket']}"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each part of plain data that holds no other part, with the way to it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inside:
        if isinstance(item, (list, dict)) and item:
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key), item


def others(value: Any) -> list[Any]:
    """Values that are near to one, or that a careless comparison takes for equal."""
    if isinstance(value, bytes):
        return [value + b"\0\0\0\0", value[:-4] + b"\1\0\0\0", b""]
    if isinstance(value, str):
        return [f"{value} ", value.upper() + "A", "", None]
    if isinstance(value, float):
        return [value + 1e-9, value / 2, int(value) + 1, -value - 1.0]
    if isinstance(value, list):  # empty: its parts are leaves otherwise
        return [["x"], [""], ["x"] * 2, None]
    return [value + 1, float(value) + 0.5, 2**40, True if value != 1 else 2]


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_no_altered_part_of_the_ticket_or_of_a_span_is_accepted(desk: Desk, purpose: str) -> None:
    plan = make_plan(desk.settings, eval_questions=2)
    ticket, asked = TICKET, plan.source.train(TICKET, ISSUED)
    if purpose == "eval":
        asked = plan.source.evaluation(EVALUATED, 1)
        ticket = asked.id
        desk.ledger.opened(ticket, EVALUATED)
    rewards = (1.0, 0.0)[: asked.num_generations]
    data = encode(make_group(asked, spans=[(5, 3)], rewards=rewards))
    check = OutcomeCheck(desk.ledger, plan.source, 32)
    assert check.why_refused(ticket, decode_outcome(data)) is None
    group = unpack(data)[2][0]
    places = [((2, 0, 0, *path), value) for path, value in leaves(group[0])]
    for number, rollout in enumerate(group[1]):
        known = [span[:-1] for span in rollout[3]]  # the names of actors are for people
        places += [((2, 0, 1, number, 3, *path), value) for path, value in leaves(known)]
    assert len(places) >= 20
    for path, value in places:
        for other in others(value):
            if pack(other) == pack(value):
                continue
            altered = unpack(data)
            part = altered
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = other
            try:
                found = decode_outcome(pack(altered))
            except MalformedMessage:
                continue
            assert check.why_refused(ticket, found) is not None, (path, value, other)


@pytest.mark.parametrize(
    ("reason", "forge"),
    [*FORGERIES, ("version", spans(Version(1, 4)))],  # published, and not the one under evaluation
)
def test_a_forged_answer_to_a_held_out_question_leaves_it_unanswered(
    desk: Desk, reason: Reason, forge: Forge
) -> None:
    plan = make_plan(desk.settings, eval_questions=1)
    asked = plan.source.evaluation(EVALUATED, 0)
    desk.ledger.opened(asked.id, EVALUATED)
    check = OutcomeCheck(desk.ledger, plan.source, 32)
    good = make_group(asked, spans=[(5, 3)], rewards=(1.0,))
    assert check.why_refused(asked.id, good) is None
    assert check.why_refused(asked.id, decode_outcome(encode(forge(good)))) == reason


def test_an_evaluation_ends_although_all_its_answers_are_forged(
    tmp_path: Path, connection: Connection, keys: Keys
) -> None:
    bench = Bench(tmp_path, connection, keys)
    bench.publish(0, evaluate=True)
    bench.work("eval_tickets", edit=of_ticket(columns={"answer": "forged"}))
    bench.flow.finish_evaluation()
    (result,) = bench.flow.evaluator.take_ended()
    assert [answer.reason for answer in result.answers] == [f"refused: {MEANING['columns']}"] * 2
    assert [answer.completions for answer in result.answers] == [(), ()]
    assert bench.balance()[0]["stale"] == 2
    assert bench.flow.intake.take_arrivals().refused == {"columns": 2}


def test_refused_answers_to_this_learners_tickets_end_a_run_that_gets_no_others() -> None:
    desk = Desk(max_resample_times=0, max_empty_updates=1)
    desk.issue(2)
    desk.arrive(0, 1, tokens=(3, 32))
    with pytest.raises(NoSignal, match=f"2 stale, {MEANING['tokens']}: 2"):
        desk.form()


@pytest.mark.parametrize(
    ("name", "changed"),
    [("temperature", 0.5), ("max_completion_length", 9), ("num_generations", 3), ("seed", 7)],
)
def test_tickets_of_before_a_start_with_other_settings_say_nothing_against_the_questions(
    name: str, changed: float
) -> None:
    desk = Desk(max_resample_times=0, max_empty_updates=1)
    desk.issue(4)
    plan = make_plan(desk.settings.model_copy(update={name: changed}))
    desk.intake = Intake(desk.ledger, plan.source, 32)
    desk.ledger.publish(Version(2, 0), "hash")
    desk.arrive(*range(4))
    assert desk.ledger.totals["stale"] == 4
    assert desk.form() is None


def test_tokens_of_an_earlier_incarnation_count_up_to_where_its_successor_started(
    tmp_path: Path, connection: Connection, keys: Keys
) -> None:
    first = Bench(tmp_path, connection, keys)
    first.publish(0)
    first.flow.issue_tickets(0)
    first.work()
    first.train(0)
    first.publish(1)
    first.flow.issue_tickets(1)
    first.work()  # by version 1.1
    second = Bench(tmp_path, connection, keys)
    with pytest.raises(RunTaken):
        first.publish(2)  # in its journal, after what its successor claimed
    second.publish(1)
    second.train(1)
    assert versions_of(second) == {Version(1, 0)}
    second.publish(2)
    second.flow.issue_tickets(2)
    second.work(edit=spans(Version(1, 2)))
    second.train(2)
    assert versions_of(second) == {Version(1, 1)}
    assert second.taken.arrivals.refused == {"version": 2}


def versions_of(bench: Bench) -> set[Version]:
    """The versions that sampled the newest batch."""
    rollouts = [made for scored in bench.taken.groups for made in scored.group.rollouts]
    return {span.version for made in rollouts for span in made.spans}


def test_what_open_tickets_may_need_is_known_and_older_versions_are_forgotten() -> None:
    ledger = Ledger()
    for step in range(10):
        ledger.publish(Version(1 + step // 4, step), f"hash {step}")
        if step == 4:
            ledger.opened(TicketId.train(0), Version(2, 4))
    assert {version.step for version in ledger.versions} == set(range(4, 10))
    again = Ledger()
    again.restore(unpack(pack(ledger.snapshot())))
    assert again.versions == ledger.versions
    again.close(TicketId.train(0), "trained")
    again.publish(Version(4, 10), "hash 10")
    assert again.versions == {Version(4, 10): "hash 10"}


def test_a_journal_of_an_earlier_build_is_refused_with_the_reason() -> None:
    table = Ledger().snapshot()
    del table["versions"]  # type: ignore[misc]
    with pytest.raises(
        MalformedMessage, match="ledger: these fields are missing or unknown: 'versions'"
    ):
        Ledger().restore(table)


def test_a_checkpoint_knows_the_hash_of_its_version(run: Run) -> None:
    run.start(steps=2, save_steps=1)
    assert run.newest_checkpoint().ledger["versions"]["1.2"] == WEIGHTS_HASH
