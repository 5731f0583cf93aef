"""A rewarder at work on a real queue server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import structlog

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.run_view import RunView
from penstock.common.errors import ContractMismatch, DeadlineExceeded
from penstock.common.monitor.snapshot import read_consumers
from penstock.common.wire.codec import decode
from penstock.common.wire.messages import ScoredGroup, Verdict
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.rewarders.filtering import NO_REWARD, NO_SPREAD
from penstock.rewarders.scoring import _NOT_THE_ANSWERS
from tests.helpers import LossyProxy, is_dead, runs_alone, wait_until
from tests.rewarders import bad_rewards
from tests.rewarders.stand_ins import (
    RewarderThread,
    RunUnderTest,
    make_contract,
    make_model_folder,
    reward,
)

pytestmark = pytest.mark.usefixtures("shared_nurseries")

StartRewarder = Callable[..., RewarderThread]


@pytest.fixture(autouse=True)
def stop_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an idle rewarder look for a signal ten times a second."""
    monkeypatch.setattr("penstock.rewarders.loop.BLOCK_MS", 100)


@pytest.fixture
def run(connection: Connection, keys: Keys, tmp_path: Path) -> RunUnderTest:
    """A run that asks for accuracy and format."""
    folder = make_model_folder(tmp_path / "model")
    run = RunUnderTest(connection, keys, make_contract(folder, {"accuracy": 1.0, "format": 0.5}))
    run.set_up()
    return run


@pytest.fixture
def rewarder(queue_server: LocalServer, run_name: str) -> StartRewarder:
    """A rewarder for the run; more can be started."""
    return lambda **options: RewarderThread(queue_server.url, run_name, **options)


def ask_for(run: RunUnderTest, *rewards: str) -> None:
    run.change_contract(rewards=tuple(reward(name) for name in rewards))


def make_meeting(tmp_path: Path) -> Path:
    """Make the folder in which scorings wait for each other (bad_rewards.wait_for_files)."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    return folder


def dead_reasons(connection: Connection, keys: Keys) -> list[str]:
    return [
        fields[b"reason"].decode() for _, fields in connection.execute("XRANGE", keys.dead, "-", "+")
    ]


def held_groups(connection: Connection, keys: Keys) -> int:
    return connection.execute("XPENDING", keys.rollouts, GROUP)["pending"]


def test_a_group_is_scored_and_goes_to_the_learner(run: RunUnderTest, rewarder: StartRewarder) -> None:
    right = "<think>sum</think><answer>4</answer>"
    run.hand_in("train:0", right, "4", "five")
    with rewarder():
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == {"accuracy": (1.0, 1.0, 0.0), "format": (1.0, 0.0, 0.0)}
    assert scored.texts == (right, "4", "five")
    assert scored.group.ticket.id == "train:0"
    assert scored.rewarder.startswith("rewarder-")


def test_rewards_see_the_prompt_the_columns_and_the_solution(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    ask_for(run, "show_arguments")
    run.hand_in("train:0", "4", "5")
    with rewarder():
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == {"show_arguments": (1.0, 2.0)}


def test_a_group_without_spread_comes_back_as_a_verdict(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    run.hand_in("train:0", "4", "four: 4")
    with rewarder():
        (verdict,) = run.outcomes("train", 1)
    assert verdict == Verdict(
        "train:0",
        "filtered",
        NO_SPREAD,
        rewards={"accuracy": (1.0, 1.0), "format": (0.0, 0.0)},
        lengths=(2, 8),
        prompt="Q?",
        completion="4",
    )


def test_a_group_whose_gold_cannot_be_read_comes_back_as_a_verdict(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    ask_for(run, "accuracy")
    run.hand_in("train:0", "4", "5", solution="it depends")
    with rewarder():
        (verdict,) = run.outcomes("train", 1)
    assert verdict == Verdict(
        "train:0", "filtered", NO_REWARD, {"accuracy": (None, None)}, (2, 2), {}, "Q?", "4"
    )


def test_an_eval_group_is_never_filtered(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.hand_in("eval:1.0:0", "4")
    run.hand_in("eval:1.0:1", "4", "4")
    with rewarder():
        outcomes = run.outcomes("eval", 2)
    assert all(isinstance(outcome, ScoredGroup) for outcome in outcomes)


def read_consumer_names(connection: Connection, keys: Keys) -> list[str]:
    return [consumer.name for consumer in read_consumers(connection, keys.rollouts)]


def test_a_reward_that_keeps_failing_ends_as_dead_and_never_as_zero(
    run: RunUnderTest, rewarder: StartRewarder, connection: Connection, keys: Keys
) -> None:
    ask_for(run, "leave")
    run.hand_in("train:0", "4", "5")
    with rewarder():
        (verdict,) = run.outcomes("train", 1)
        (name,) = read_consumer_names(connection, keys)
    line = bad_rewards.leave.__code__.co_firstlineno
    killed = f"reward leave: killed its process (exit code 3), in bad_rewards.py, line {line}"
    cause = f"{killed}, for the completion `0` too: {_NOT_THE_ANSWERS}"
    reason = f"{cause} (reported by {name})"
    assert verdict == Verdict("train:0", "dead", reason)
    assert dead_reasons(connection, keys) == [reason]


def test_a_reward_that_failed_is_tried_again(
    run: RunUnderTest, rewarder: StartRewarder, tmp_path: Path
) -> None:
    ask_for(run, "hang_once")
    run.hand_in("train:0", "4", "five", marker=str(tmp_path / "marker"))
    with rewarder(timeout_s=4.0, user=""):
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)
    assert scored.rewards == {"hang_once": (1.0, 4.0)}


def test_a_message_that_cannot_be_read_ends_as_dead(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.hand_in_bytes("train:0", b"not a group")
    run.hand_in_bytes("eval:1.0:0", b"not a group either")
    with rewarder():
        (train,) = run.outcomes("train", 1)
        (evaluation,) = run.outcomes("eval", 1)
    for verdict in (train, evaluation):
        assert isinstance(verdict, Verdict)
        assert verdict.state == "dead"
        assert "bytes are not msgpack of plain data" in verdict.reason


def test_a_group_under_another_tickets_name_ends_as_dead(
    run: RunUnderTest, rewarder: StartRewarder, connection: Connection
) -> None:
    run.hand_in("train:0", "4", "5")
    payload = connection.execute("XRANGE", run.keys.rollouts, "-", "+")[0][1][b"d"]
    run.hand_in_bytes("train:1", payload)
    with rewarder():
        outcomes = run.outcomes("train", 2)
    assert isinstance(outcomes[0], ScoredGroup)
    assert isinstance(outcomes[1], Verdict)
    assert outcomes[1].reason.startswith(
        "the entry of ticket train:1 holds a group of train:0, which no actor sends: "
        "see who else writes to the queue server (reported by rewarder-"
    )


def test_work_of_a_lost_rewarder_is_taken_over(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.hand_in("train:0", "4", "5")
    assert run.stream(run.keys.rollouts, "rewarder-lost").take(1)
    with rewarder(lease_s=0.3):
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)


def test_a_long_scoring_keeps_its_lease(
    run: RunUnderTest, rewarder: StartRewarder, tmp_path: Path
) -> None:
    ask_for(run, "wait_for_files")
    meeting = make_meeting(tmp_path)
    run.hand_in("train:0", "4", "five", folder=str(meeting), count=2)
    with rewarder(lease_s=2.0, timeout_s=60.0, user=""):
        other = run.stream(run.keys.rollouts, "rewarder-other", lease_s=2.0)
        wait_until(lambda: list(meeting.iterdir()), "the start of the scoring")
        for _ in range(50):
            assert not other.reclaim(1)
            time.sleep(0.1)
        (meeting / "end").touch()
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)


def test_a_busy_rewarder_sees_a_lease_expire_and_takes_that_group_before_new_ones(
    run: RunUnderTest, rewarder: StartRewarder, tmp_path: Path
) -> None:
    ask_for(run, "wait_for_files")
    meeting = make_meeting(tmp_path)
    for number in range(3):
        run.hand_in(f"train:{number}", "4", "five", folder=str(meeting), count=2)
        if not number:
            assert run.stream(run.keys.rollouts, "rewarder-silent", lease_s=1.0).take(1)
    with rewarder(lease_s=1.0, workers=1, timeout_s=60.0, user=""):
        wait_until(lambda: list(meeting.iterdir()), "the start of the scoring")
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 4.0, "the silent rewarder's lease to be over")
        (meeting / "end").touch()
        scored = run.outcomes("train", 3)
    assert [one.group.ticket.id for one in scored] == ["train:1", "train:0", "train:2"]


def test_a_doomed_group_is_buried(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.hand_in("train:0", "4", "5")
    lost = run.stream(run.keys.rollouts, "rewarder-lost", lease_s=0.1)
    (entry,) = lost.take(1)
    lost.mark_alone(entry)
    with rewarder(lease_s=0.1):
        (verdict,) = run.outcomes("train", 1)
    assert verdict == Verdict("train:0", "dead", "the rewarder was lost while it scored only this")


def test_a_last_attempt_is_made_alone(
    run: RunUnderTest, rewarder: StartRewarder, connection: Connection, keys: Keys
) -> None:
    ask_for(run, "slow")
    unlucky = run.stream(run.keys.rollouts, "unlucky")
    run.hand_in("train:1", "4", "five")
    unlucky.fail(unlucky.take(1)[0], "train", "no luck")
    (entry,) = unlucky.take(1)
    run.hand_in("train:0", "4", "five")
    unlucky.fail(entry, "train", "no luck")
    run.hand_in("train:2", "4", "five")
    with rewarder(workers=3):
        wait_until(lambda: runs_alone(connection, keys.rollouts), "the attempt made alone")
        _, places, _ = RunView(connection, keys).audit()
        assert {place.ticket for place in places if place.stream == keys.scored} == {"train:0"}
        outcomes = run.outcomes("train", 3)
    order = [outcome.group.ticket.id for outcome in outcomes if isinstance(outcome, ScoredGroup)]
    assert order == ["train:0", "train:1", "train:2"]


def test_groups_are_scored_side_by_side(
    run: RunUnderTest, rewarder: StartRewarder, tmp_path: Path
) -> None:
    """Each of the four scorings waits until all four have begun."""
    ask_for(run, "wait_for_files")
    meeting = make_meeting(tmp_path)
    for number in range(4):
        run.hand_in(f"train:{number}", "4", "five", folder=str(meeting), count=4)
    with rewarder(workers=4, timeout_s=60.0, user=""):
        run.outcomes("train", 4)
    assert len(list(meeting.iterdir())) == 4  # none was killed and tried again


def test_no_more_is_taken_than_can_be_scored(
    run: RunUnderTest, rewarder: StartRewarder, connection: Connection, keys: Keys
) -> None:
    ask_for(run, "slow")
    for number in range(4):
        run.hand_in(f"train:{number}", "4", "five")
    held = []

    def are_scored() -> bool:
        held.append(held_groups(connection, keys))
        return len(run.queue.outcomes("train", "0-0", 5)) == 4

    with rewarder(workers=2):
        wait_until(are_scored, "four outcomes")
    assert max(held) == 2


def test_stopping_finishes_what_is_held_and_leaves(
    run: RunUnderTest, rewarder: StartRewarder, connection: Connection, keys: Keys
) -> None:
    ask_for(run, "slow")
    run.hand_in("train:0", "4", "five")
    with rewarder():
        wait_until(lambda: held_groups(connection, keys), "the start")
    (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)
    assert not connection.execute("XINFO", "CONSUMERS", keys.rollouts, GROUP)


def test_a_scored_group_is_handed_on_though_the_server_refuses_once_after_a_signal(
    run: RunUnderTest, queue_server: LocalServer, run_name: str, tmp_path: Path
) -> None:
    ask_for(run, "wait_for_files")
    meeting = make_meeting(tmp_path)
    run.hand_in("train:0", "4", "five", folder=str(meeting), count=2)
    with LossyProxy(queue_server.url) as proxy:
        with RewarderThread(proxy.url, run_name, timeout_s=60.0, user="") as running:
            wait_until(lambda: list(meeting.iterdir()), "the start of the scoring")
            proxy.answer(b"penstock_4_handoff", reply=b"-READONLY a replica\r\n", times=2)
            running.stopping.set()
            (meeting / "end").touch()
            running.join()
        assert proxy.unanswered == []
    (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)


def test_the_end_of_the_run_ends_the_rewarder(run: RunUnderTest, rewarder: StartRewarder) -> None:
    with rewarder() as running:
        run.hand_in("train:0", "4", "5")
        run.outcomes("train", 1)
        run.queue.set_state("ended")
        running.join()
    assert running.error is None


def test_a_rewarder_that_joins_an_ended_run_waits_for_the_learner_that_goes_on_with_it(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    """The server kept the state: all are started again at once, and the learner needs longest."""
    run.queue.set_state("ended")
    run.queue.beat(0.0, "leaving")
    with structlog.testing.capture_logs() as logs, rewarder() as joining:
        wait_until(lambda: logs or not joining.thread.is_alive(), "it to look")
        run.queue = LearnerQueue(run.connection, run.keys, 2)
        run.queue.claim("nonce", "the next one", 30.0)
        run.set_up()
        run.hand_in("train:0", "4", "5")
        run.outcomes("train", 1)
    assert "The run has ended. Waiting 5 s for a learner that" in logs[0]["event"]


def test_nobody_goes_on_with_an_ended_run(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.queue.set_state("ended")
    with structlog.testing.capture_logs() as logs, rewarder() as joining:
        joining.join()
    assert joining.error is None
    assert ["The run has ended" in log["event"] for log in logs] == [True]


def test_a_changed_contract_is_followed(run: RunUnderTest, rewarder: StartRewarder) -> None:
    with rewarder():
        run.hand_in("train:0", "4", "five")
        run.outcomes("train", 1)
        run.change_contract(filter_zero_std=False)
        run.hand_in("train:1", "4", "4")
        outcomes = run.outcomes("train", 2)
    assert all(isinstance(outcome, ScoredGroup) for outcome in outcomes)


def test_a_group_of_an_older_contract_is_scored_all_the_same(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    run.hand_in("train:0", "4", "five")
    run.change_contract(credit=9)
    with rewarder():
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)


def test_an_emptied_server_is_waited_for_and_joined_again(
    private_server: LocalServer, tmp_path: Path
) -> None:
    connection = Connection(private_server.url, 10, 10)
    contract = make_contract(make_model_folder(tmp_path / "model"), {"accuracy": 1.0})
    run = RunUnderTest(connection, Keys("emptied"), contract)
    run.set_up()
    with structlog.testing.capture_logs() as logs, RewarderThread(private_server.url, "emptied"):
        run.hand_in("train:0", "4", "five")
        run.outcomes("train", 1)
        connection.execute("FLUSHALL")
        wait_until(lambda: any("set up the run again" in log["event"] for log in logs), "the notice")
        run.set_up()
        run.hand_in("train:1", "4", "five")
        (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)


def test_another_tokenizer_is_refused(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.change_contract(tokenizer_hash="0" * 64)
    with pytest.raises(ContractMismatch, match="tokenizer"), rewarder() as running:
        running.join()


def test_an_unknown_reward_is_refused_by_name(run: RunUnderTest, rewarder: StartRewarder) -> None:
    ask_for(run, "accuracy", "politeness")
    with pytest.raises(ContractMismatch, match="politeness"), rewarder() as running:
        running.join()


def test_a_contract_that_becomes_impossible_ends_the_rewarder(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    running = rewarder()
    running.thread.start()
    run.hand_in("train:0", "4", "five")
    run.outcomes("train", 1)
    ask_for(run, "politeness")
    run.hand_in("train:1", "4", "five")
    running.join()
    assert isinstance(running.error, ContractMismatch)


def test_what_is_held_is_finished_even_by_a_rewarder_that_must_end(
    run: RunUnderTest, rewarder: StartRewarder, connection: Connection, keys: Keys
) -> None:
    ask_for(run, "slow")
    run.hand_in("train:0", "4", "five")
    running = rewarder(workers=2)
    running.thread.start()
    wait_until(lambda: held_groups(connection, keys), "the start")
    ask_for(run, "politeness")
    run.hand_in("train:1", "4", "five")
    running.join()
    assert isinstance(running.error, ContractMismatch)
    (scored,) = run.queue.outcomes("train", "0-0", 2)
    assert scored.ticket == "train:0"


def test_a_run_that_nobody_sets_up_is_not_waited_for_for_ever(queue_server: LocalServer) -> None:
    rewarder = RewarderThread(queue_server.url, "nobody")
    rewarder._settings = rewarder._settings.model_copy(
        update={"run": rewarder._settings.run.model_copy(update={"join_timeout_s": 0.3})}
    )
    with pytest.raises(DeadlineExceeded, match="no learner"), rewarder:
        rewarder.join()


def test_a_rewarder_leaves_a_learner_that_gives_no_sign_of_life(
    run: RunUnderTest, rewarder: StartRewarder
) -> None:
    told = r"no heartbeat .* the learner is learner \(incarnation 1\), no weights are announced"
    leaving = rewarder(progress_timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match=told), leaving:
        wait_until(lambda: not leaving.thread.is_alive(), "it to leave")


def test_a_rewarder_that_waits_for_a_learner_can_be_stopped(queue_server: LocalServer) -> None:
    with RewarderThread(queue_server.url, "nobody") as waiting:
        time.sleep(0.1)
        waiting.stopping.set()
        waiting.join()


@pytest.fixture
def command(queue_server: LocalServer, run_name: str) -> Iterator[subprocess.Popen[bytes]]:
    """The rewarder's own command, for the run."""
    environment = os.environ | {"REDIS_URL": queue_server.url, "RUN_NAME": run_name}
    with subprocess.Popen([sys.executable, "-m", "penstock.rewarders"], env=environment) as command:
        yield command
        command.kill()


@pytest.mark.e2e
def test_the_command_serves_a_run_and_a_signal_ends_it_with_zero(
    run: RunUnderTest, command: subprocess.Popen[bytes]
) -> None:
    run.hand_in("train:0", "4", "five")
    (scored,) = run.outcomes("train", 1)
    assert isinstance(scored, ScoredGroup)
    command.send_signal(signal.SIGTERM)
    assert command.wait(15) == 0


@pytest.mark.e2e
def test_a_killed_command_leaves_no_process_behind(
    run: RunUnderTest, command: subprocess.Popen[bytes]
) -> None:
    ask_for(run, "accuracy")
    run.hand_in("train:0", "$9^{9^{9^{9}}}$", "five")
    wait_until(lambda: held_groups(run.connection, run.keys), "the start of an endless scoring")
    descendants = psutil.Process(command.pid).children(recursive=True)
    command.kill()
    wait_until(lambda: all(is_dead(one.pid) for one in descendants), "their end")


def test_an_outcome_survives_the_wire(run: RunUnderTest, rewarder: StartRewarder) -> None:
    run.hand_in("train:0", "4", "five")
    with rewarder():
        run.outcomes("train", 1)
    (entry,) = run.queue.outcomes("train", "0-0", 1)
    scored = decode(entry.payload, ScoredGroup)
    assert [list(rollout.token_ids) for rollout in scored.group.rollouts] == [
        [21, 0],
        [71, 74, 87, 70, 0],
    ]
