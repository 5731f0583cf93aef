"""The proof that an engine computes what the learner computes: no token leaves an actor before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog

from penstock.actors import ticket_worker
from penstock.actors.engine import PromptRefused
from penstock.actors.weights.probing import mean_difference, probe_limit
from penstock.common.config.settings import ActorSettings
from penstock.common.errors import ConfigError, Disagreement, MalformedMessage
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.messages import Float32s, Int32s, Probe, Rollout, Version, Weights
from tests.actors.conftest import ActorThread, Run
from tests.fake_engine import FakeEngine
from tests.helpers import wait_until

StartActor = Callable[..., ActorThread]

IDS = np.arange(3, 10, dtype="<i4")
PROBES = (Probe(IDS, np.full(6, -2.0, "<f4")), Probe(IDS[:3], np.full(2, -1.0, "<f4")))


class Refusing(FakeEngine):
    """It refuses all texts of the first probe."""

    async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
        if self.loads == 1:
            raise PromptRefused("no such token")
        return await super().score(request_id, token_ids)


def sampled_by(a_run: Run) -> set[int]:
    """The steps of the versions that sampled a token of a group that was handed off."""
    rollouts = [rollout for group in a_run.groups().values() for rollout in group.rollouts]
    return {span.version.step for rollout in rollouts for span in rollout.spans}


def attempts(a_run: Run) -> dict[str, int]:
    """By ticket that waits on the stream, how often it was tried."""
    return {entry.ticket: entry.attempts for entry in a_run.stream("test").take(100)}


def test_groups_wait_until_the_weights_are_proven(a_run: Run, start_actor: StartActor) -> None:
    engine = FakeEngine(score_delay_s=1.0)
    a_run.announce(0, probes=PROBES)
    a_run.issue(*(a_run.ticket(number) for number in range(4)))
    start_actor(engine)
    wait_until(lambda: len(engine.requests) == 4 and not engine._in_flight, "four sampled groups")
    early = a_run.groups()
    assert not early or len(engine.scored) == 2
    wait_until(lambda: len(a_run.groups()) == 4, "four groups")
    assert len(engine.scored) == 2
    assert engine.loads == 1


def test_an_engine_that_has_weights_from_before_a_rejoin_is_proven_first(
    a_run: Run, start_actor: StartActor
) -> None:
    engine = FakeEngine(taken=[Version(1, 0)])
    a_run.issue(a_run.ticket(0))
    start_actor(engine)
    wait_until(lambda: a_run.pending() == 1, "a ticket that is held")
    time.sleep(0.3)
    assert not engine.requests
    a_run.announce(0, probes=PROBES)
    wait_until(a_run.groups, "a group")
    assert len(engine.scored) == 2


def test_nothing_that_wrong_weights_sampled_leaves_the_actor(
    a_run: Run, start_actor: StartActor
) -> None:
    engine = FakeEngine(token_delay_s=0.02)
    a_run.announce(0, probes=PROBES)
    start_actor(engine)
    wait_until(lambda: len(engine.scored) == 2, "the first proof")
    engine.wrong_loads, engine.score_delay_s = 2, 0.3  # the second load
    a_run.announce(1, probes=PROBES)
    a_run.issue(*(a_run.ticket(number, min_step=1) for number in range(6)))
    wait_until(lambda: engine.loads == 3, "a second load")
    assert engine.aborted
    assert not a_run.groups()
    wait_until(lambda: len(a_run.groups()) == 6, "six groups")
    assert engine.taken == [Version(1, 0), Version(1, 1), Version(1, 1)]
    aborted = {request.split("/")[0] for request in engine.aborted}
    again = [request for request in engine.requests if request.split("/")[0] in aborted]
    assert len(again) == 2 * len(aborted)  # sampled once more, after they went back
    assert a_run.pending() == 0


def test_an_actor_whose_engine_stays_wrong_ends_and_its_tickets_go_back(
    a_run: Run, start_actor: StartActor
) -> None:
    engine = FakeEngine(token_delay_s=0.02, wrong_loads=100, score_delay_s=0.2)
    a_run.announce(0, probes=PROBES)
    a_run.issue(*(a_run.ticket(number) for number in range(6)))
    actor = start_actor(engine)
    actor.wait()
    assert isinstance(actor.error, Disagreement)
    assert "differ from the learner's by 1 on average, expected at most 0.01" in str(actor.error)
    assert actor.error.exit_code == 82
    assert engine.loads == 2
    assert not a_run.groups()
    assert attempts(a_run) == {f"train:{number}": 0 for number in range(6)}


def test_an_announcement_of_another_client_does_not_end_the_actor(
    a_run: Run, start_actor: StartActor
) -> None:
    a_run.announce(0, probes=PROBES)
    right = decode(a_run.connection.execute("GET", a_run.keys.weights), Weights)
    forged = replace(right, probes=(Probe(IDS, np.full(6, -9.0, "<f4")),))
    a_run.connection.execute("SET", a_run.keys.weights, encode(forged))
    engine = FakeEngine(wrong_loads=2)
    actor = start_actor(engine)
    wait_until(lambda: engine.loads == 2, "the second load")
    a_run.queue.restore()
    a_run.issue(a_run.ticket(0))
    wait_until(a_run.groups, "a group")
    assert actor.error is None
    assert engine.loads == 3


def test_a_probe_of_another_client_that_the_engine_refuses_holds_back_evaluations(
    a_run: Run, start_actor: StartActor
) -> None:
    engine = Refusing()
    a_run.announce(0, probes=PROBES)
    right = decode(a_run.connection.execute("GET", a_run.keys.weights), Weights)
    a_run.connection.execute("SET", a_run.keys.weights, encode(replace(right, probes=PROBES[1:])))
    a_run.issue(*(a_run.eval_ticket(number, step=0) for number in range(3)))
    actor = start_actor(engine)
    wait_until(lambda: engine.loads == 1, "the first load")
    a_run.queue.restore()
    wait_until(lambda: len(a_run.groups()) == 3, "the evaluation")
    assert actor.error is None
    assert engine.loads == 2


def test_an_engine_that_is_wrong_with_two_versions_ends_the_actor(
    a_run: Run, start_actor: StartActor
) -> None:
    """The learner publishes the next version meanwhile, so the announcement differs each time."""
    engine = FakeEngine(wrong_loads=100)
    a_run.announce(0, probes=PROBES)
    actor = start_actor(engine)
    for step in (1, 2):
        wait_until(lambda most=2 * step: engine.loads >= most, "a second load")
        a_run.announce(step, probes=PROBES)
    actor.wait()
    assert isinstance(actor.error, Disagreement)


def test_what_ends_long_after_the_proof_failed_goes_back_too(
    a_run: Run, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(FakeEngine):
        """Its first group ends once the weights are proven, whatever was aborted."""

        async def generate(self, *request: Any) -> tuple[Rollout, ...]:
            rollouts = await super().generate(*request)
            while len(self.requests) == 1 and self.loads < 2:
                await asyncio.sleep(0.01)
            return rollouts

        async def abort(self, request_id: str) -> None:
            self.aborted.append(request_id)

    monkeypatch.setattr(ticket_worker, "_ABORT_S", 0.1)
    engine = Late(wrong_loads=1, score_delay_s=0.3)
    a_run.announce(0, probes=PROBES)
    a_run.issue(a_run.ticket(0))
    start_actor(engine)
    wait_until(lambda: len(a_run.groups()) == 1, "a group")
    assert engine.loads == 2
    assert len(engine.requests) == 2  # the first one was discarded


def test_refused_weights_do_not_hold_back_what_the_old_ones_sample(
    a_run: Run, start_actor: StartActor
) -> None:
    actor = start_actor(FakeEngine())
    a_run.announce(0, probes=PROBES)
    wait_until(lambda: len(actor.engine.scored) == 2, "the first proof")
    with structlog.testing.capture_logs() as logs:
        a_run.announce(1, wrong=True, probes=PROBES)
        wait_until(
            lambda: any("Weights 1.1 are not loaded" in log["event"] for log in logs), "the refusal"
        )
    a_run.issue(a_run.ticket(0))
    wait_until(lambda: len(a_run.groups()) == 1, "a group")
    assert sampled_by(a_run) == {0}


def test_an_actor_that_cannot_load_the_weights_once_more_ends(
    a_run: Run, start_actor: StartActor
) -> None:
    engine = FakeEngine(wrong_loads=100, score_delay_s=0.3)
    a_run.announce(0, probes=PROBES)
    actor = start_actor(engine)
    wait_until(lambda: engine.taken, "the first load")
    (a_run.run_folder.version(1, 0) / "model.safetensors").unlink()
    actor.wait()
    assert isinstance(actor.error, Disagreement)
    assert "cannot be loaded once more" in str(actor.error)


def test_an_engine_that_refuses_all_probes_proves_nothing(a_run: Run, start_actor: StartActor) -> None:
    class Refusing(FakeEngine):
        async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
            raise PromptRefused("too long")

    a_run.announce(0, probes=PROBES)
    actor = start_actor(Refusing())
    actor.wait()
    assert isinstance(actor.error, ConfigError)
    assert "ACTOR_PROBE_LIMIT=0" in str(actor.error)


@pytest.mark.parametrize("how", ["no probes", "no limit"])
def test_without_probes_or_a_limit_nothing_is_proven(
    a_run: Run, start_actor: StartActor, how: str
) -> None:
    a_run.announce(0, probes=() if how == "no probes" else PROBES)
    a_run.issue(a_run.ticket(0))
    start_actor(FakeEngine(wrong_loads=100), **({"probe_limit": 0.0} if how == "no limit" else {}))
    wait_until(lambda: len(a_run.groups()) == 1, "a group")


def test_the_difference_is_the_mean_over_all_tokens() -> None:
    class Scoring(FakeEngine):
        async def score(self, request_id, token_ids):  # type: ignore[no-untyped-def]
            return np.full(len(token_ids) - 1, -1.0, "<f4")

    assert asyncio.run(mean_difference(Scoring(), PROBES)) == pytest.approx(6 / 8)
    assert asyncio.run(mean_difference(Scoring(), ())) == 0.0


def test_the_limit_is_that_of_the_coarser_precision(a_run: Run) -> None:
    assert probe_limit(ActorSettings(), a_run.contract) == 0.01
    assert probe_limit(ActorSettings(dtype="bfloat16"), a_run.contract) == 0.1
    assert probe_limit(ActorSettings(dtype="bfloat16", probe_limit=0.5), a_run.contract) == 0.5


def test_probes_travel_with_the_announcement() -> None:
    weights = decode(encode(Weights(Version(1, 0), "folder", "0" * 64, "", probes=PROBES)), Weights)
    assert [probe.token_ids.tolist() for probe in weights.probes] == [IDS.tolist(), IDS[:3].tolist()]
    assert weights.probes[0].logprobs.tolist() == [-2.0] * 6


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        ([3], []),
        ([3, 4], [-1.0, -1.0]),
        ([3, -4], [-1.0]),
        ([3, 4], [float("nan")]),
        ([3, 4], [0.5]),
        ([3] * 1025, [-1.0] * 1024),
    ],
    ids=["one token", "sizes", "negative id", "nan", "above 0", "too long"],
)
def test_an_impossible_probe_is_refused(ids: list[int], values: list[float]) -> None:
    with pytest.raises(MalformedMessage, match="probe"):
        Probe(np.array(ids, "<i4"), np.array(values, "<f4"))
