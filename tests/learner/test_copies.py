"""A run that went on in a copy of its folder does not go on in the older one."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import structlog

from penstock.common.broker.connection import Connection
from penstock.common.broker.lease_keeper import KeeperThread
from penstock.common.broker.run_view import RunView
from penstock.common.config.settings import RunSettings
from penstock.common.errors import ConfigError, ContractMismatch, OtherRelease, PenstockError, RunTaken
from penstock.common.files.lock import hold_lock, of_this_host
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.claims import read_claims
from penstock.common.wire import codec
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract
from penstock.learner.start import _claim
from penstock.learner.state.copies import check_not_older, check_release, name_of
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.learner.test_flow import Bench


@pytest.fixture
def copy(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "copy")


def run_in(folder: Path, connection, keys) -> Bench:
    """The next learner of the run, in a folder, as far as a first batch."""
    bench = Bench(folder, connection, keys)
    bench.queue.own(name_of(RunFolder(folder)), bench.claim.holder)
    bench.publish(0)
    bench.flow.issue_tickets(0)
    bench.work()
    return bench


@pytest.mark.parametrize("restarted", [False, True], ids=["a longer journal", "a newer claim"])
def test_an_older_copy_is_refused_and_both_folders_are_named(
    tmp_path, connection, keys, copy, restarted
):
    newest = tmp_path / "newest"
    newest.mkdir()
    bench = run_in(newest, connection, keys)
    view = RunView(connection, keys)
    shutil.copytree(newest, copy.path)
    check_not_older(copy, view)
    if restarted:
        bench = run_in(newest, connection, keys)
        for segment in copy.journal.iterdir():
            assert (newest / "journal" / segment.name).stat().st_size >= segment.stat().st_size
    bench.train(0)
    with pytest.raises(ConfigError, match="is an older copy") as caught:
        check_not_older(copy, view)
    for told in (name_of(copy), name_of(RunFolder(newest)), "queues discard"):
        assert told in str(caught.value)
    check_not_older(RunFolder(newest), view)


def test_a_folder_that_went_on_by_itself_under_the_same_number_is_refused(
    tmp_path, connection, keys, copy, monkeypatch
):
    """Going back on purpose begins with an empty server, so both branches claim the next number."""
    newest = tmp_path / "newest"
    newest.mkdir()
    run_in(newest, connection, keys)
    shutil.copytree(newest, copy.path)
    run_in(copy.path, connection, keys).train(0)
    connection.execute("DEL", *keys.all)
    monkeypatch.setattr("penstock.common.files.lock._START", "another")
    bench = run_in(newest, connection, keys)
    view = RunView(connection, keys)
    assert bench.claim.incarnation == max(read_claims(copy)) == 2
    with pytest.raises(ConfigError, match="another claim of incarnation 2") as caught:
        check_not_older(copy, view)
    assert name_of(RunFolder(newest)) in str(caught.value)
    check_not_older(RunFolder(newest), view)


def test_a_server_that_knows_nothing_is_told_of(tmp_path, connection, keys):
    Bench(tmp_path, connection, keys)
    with structlog.testing.capture_logs() as logs:
        check_not_older(RunFolder(tmp_path), RunView(connection, keys))
    assert "does not know" in logs[0]["event"]


@pytest.mark.parametrize("claimed", ["5000", "x", "-1", "9" * 15])
def test_numbers_that_no_learner_wrote_refuse_no_folder(tmp_path, connection, keys, claimed):
    Bench(tmp_path, connection, keys)
    connection.execute("HSET", keys.fence, "claimed", claimed, "journal", "10", "folder", "x")
    check_not_older(RunFolder(tmp_path), RunView(connection, keys))


def test_the_learner_restores_what_the_server_knows_of_its_folder(tmp_path, connection, keys):
    bench = run_in(tmp_path, connection, keys)
    connection.execute("HSET", keys.fence, "claimed", "3", "journal", "9" * 9, "folder", "x")
    bench.queue.restore()
    known = (1, bench.commit_log.position.offset, bench.claim.holder, name_of(RunFolder(tmp_path)))
    assert RunView(connection, keys).newest_folder() == known
    check_not_older(RunFolder(tmp_path), RunView(connection, keys))


def test_a_learner_that_was_killed_between_its_two_claims_is_followed(tmp_path, connection, keys):
    run_in(tmp_path, connection, keys)
    connection.execute("HSET", keys.fence, "incarnation", "2")  # and no file claims it
    check_not_older(RunFolder(tmp_path), RunView(connection, keys))


def test_a_run_of_another_release_is_not_taken_over_while_its_tickets_are_open(
    tmp_path, connection, keys, monkeypatch
):
    bench = Bench(tmp_path, connection, keys)
    bench.publish(0)
    view = RunView(connection, keys)
    check_release(view)
    monkeypatch.setattr(codec, "SCHEMA", 3)
    connection.execute("SET", keys.contract, encode(bench.plan.contract))
    monkeypatch.undo()
    check_release(view)  # no ticket is open
    bench.flow.issue_tickets(0)
    with pytest.raises(
        OtherRelease, match=r"wire schema 3, expected .* 4 of its tickets are open"
    ) as caught:
        check_release(view)
    assert caught.value.exit_code == ContractMismatch.exit_code
    with pytest.raises(PenstockError) as workers:
        decode(view.contract(), Contract)
    assert workers.value.exit_code == caught.value.exit_code


def test_a_contract_of_another_client_keeps_no_learner_away(tmp_path, connection, keys):
    bench = Bench(tmp_path, connection, keys)
    bench.publish(0)
    bench.flow.issue_tickets(0)
    connection.execute("SET", keys.contract, b"junk")
    check_release(RunView(connection, keys))


def start_in(folder: RunFolder, connection, keys, gone=()) -> None:
    """The begin of a learner's start."""
    run = RunSettings(name=folder.path.name, dir=folder.path.parent, lease_s=2.0)
    _claim(run, RunView(connection, keys), connection, "nonce", list(gone))


def test_the_lock_of_a_copy_takes_the_run_from_no_learner_that_lives(
    tmp_path, connection, keys, queue_server, monkeypatch
):
    newest, copy = RunFolder(tmp_path / "newest"), RunFolder(tmp_path / "copy")
    newest.path.mkdir()
    other = "penstock.common.files.lock._START"
    with monkeypatch.context() as patch, closing(Connection(queue_server.url, 10, 60)) as beats:
        patch.setattr(other, "before")
        with hold_lock(newest.learner_lock, "learner"):
            bench = run_in(newest.path, beats, keys)
            shutil.copytree(newest.path, copy.path)
            patch.undo()
            bench.queue.beat(2.0, "working")
            keeper = KeeperThread("test's leases", 0.1, lambda: bench.queue.beat(2.0, "working"))
            keeper.start()
            with (
                hold_lock(copy.learner_lock, "learner") as before,
                pytest.raises(RunTaken, match="holds run"),
            ):
                start_in(copy, connection, keys, of_this_host(before))
            keeper.stop()
        bench.queue.beat(2.0, "working")  # it was not superseded


def test_a_refused_copy_ends_no_learner(tmp_path, connection, keys, copy):
    """The right one may be stopped for longer than its lease."""
    newest = tmp_path / "newest"
    newest.mkdir()
    bench = run_in(newest, connection, keys)
    shutil.copytree(newest, copy.path)
    bench.train(0)
    before = connection.execute("HGETALL", keys.fence)
    with pytest.raises(ConfigError, match="is an older copy"):
        start_in(copy, connection, keys)
    assert connection.execute("HGETALL", keys.fence) == before
    bench.queue.beat(2.0, "working")


def test_an_older_folder_restored_in_place_ends_no_learner(
    tmp_path, connection, keys, copy, monkeypatch
):
    """The lock's file of the older folder names the learner, which lives and has lost its folder."""
    newest = RunFolder(tmp_path / "newest")
    newest.path.mkdir()
    with hold_lock(newest.learner_lock, "learner"):
        bench = run_in(newest.path, connection, keys)
        shutil.copytree(newest.path, copy.path)
        bench.train(0)
        bench.queue.beat(2.0, "working")
        newest.path.rename(tmp_path / "away")
        copy.path.rename(newest.path)
        monkeypatch.setattr("penstock.common.files.lock._START", "later")
        with (
            hold_lock(newest.learner_lock, "learner") as gone,
            pytest.raises(ConfigError, match="older"),
        ):
            start_in(newest, connection, keys, of_this_host(gone))
        bench.queue.beat(2.0, "working")  # it was not superseded


def test_a_copy_that_is_found_out_after_its_claim_does_not_hold_the_run(
    tmp_path, connection, keys, copy, monkeypatch
):
    """The run may go on in the other folder while the learner of the copy waits for a lease."""
    newest = tmp_path / "newest"
    newest.mkdir()
    bench = run_in(newest, connection, keys)
    shutil.copytree(newest, copy.path)
    claim = LearnerQueue.claim

    def claim_late(*given):
        bench.train(0)
        claim(*given)

    monkeypatch.setattr(LearnerQueue, "claim", claim_late)
    with pytest.raises(ConfigError, match="is an older copy"):
        start_in(copy, connection, keys)
    assert connection.execute("HGET", keys.fence, "lease") == b"0"
    monkeypatch.undo()
    start_in(RunFolder(newest), connection, keys)
