"""The journal, the claims and what a resume reads of them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from penstock.common.errors import ConfigError, RunTaken
from penstock.common.files.lock import hold_lock
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Position, read_chain, read_claims
from penstock.common.journal.segments import read_journal, valid_length
from penstock.learner.state.incarnations import claim_incarnation, next_incarnation
from penstock.learner.state.journal import Journal
from tests.learner.builders import claim_next

LOOP = b'{"incarnation": 2, "parent": 2, "parent_length": 0, "holder": "x"}'


def steps(folder, claim, start=None):
    return [record["step"] for _, record in read_chain(RunFolder(folder), claim, start)]


def test_records_come_back_in_order_with_the_position_after_each(tmp_path):
    journal = Journal(LearnerFolder(tmp_path, 1))
    positions = [journal.append("batch", step=step, groups=[b"x" * step]) for step in (1, 2, 3)]
    found = list(read_journal(RunFolder(tmp_path), 1))
    assert [record["groups"] for _, record in found] == [[b"x"], [b"xx"], [b"xxx"]]
    assert [offset for offset, _ in found] == [position.offset for position in positions]


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_torn_or_flipped_last_record_is_cut(tmp_path, damage):
    journal = Journal(LearnerFolder(tmp_path, 1))
    whole = journal.append("batch", step=1)
    journal.append("batch", step=2)
    path = RunFolder(tmp_path).segment(1, 0)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-1]
    else:
        data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert valid_length(RunFolder(tmp_path), 1) == whole.offset


def test_every_truncation_leaves_only_whole_records(tmp_path):
    journal = Journal(LearnerFolder(tmp_path, 1))
    ends = [journal.append("batch", step=step).offset for step in (1, 2)]
    path = RunFolder(tmp_path).segment(1, 0)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert valid_length(RunFolder(tmp_path), 1) == max(
            (end for end in ends if end <= length), default=0
        )


def test_what_a_superseded_learner_appends_is_not_part_of_the_run(tmp_path):
    first = claim_next(tmp_path)
    journal = Journal(LearnerFolder(tmp_path, first.incarnation))
    journal.append("batch", step=1)
    second = claim_next(tmp_path)
    journal.append("batch", step=2)  # the zombie
    Journal(LearnerFolder(tmp_path, second.incarnation)).append("batch", step=7)
    third = claim_next(tmp_path)
    assert steps(tmp_path, third) == [1, 7]


def test_a_resume_reads_from_the_checkpoints_position(tmp_path):
    first = claim_next(tmp_path)
    journal = Journal(LearnerFolder(tmp_path, first.incarnation))
    positions = [journal.append("batch", step=step) for step in (1, 2)]
    second = claim_next(tmp_path)
    Journal(LearnerFolder(tmp_path, second.incarnation)).append("batch", step=3)
    third = claim_next(tmp_path)
    assert steps(tmp_path, third, positions[0]) == [2, 3]
    assert steps(tmp_path, third, Position(2, 0)) == [3]


def test_an_incarnation_is_above_all_that_folder_and_redis_know(tmp_path):
    assert claim_next(tmp_path).incarnation == 1
    later = claim_next(tmp_path, known=6)
    assert (later.incarnation, later.parent) == (7, 1)


def test_a_second_learner_is_refused_and_the_first_one_named(tmp_path):
    path = RunFolder(tmp_path).learner_lock
    taken = pytest.raises(RunTaken, match=f"process {os.getpid()}")
    with hold_lock(path, "learner"), taken, hold_lock(path, "learner"):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_no_lock_works_only_what_has_a_lease_goes_on(tmp_path, monkeypatch, code):
    """Nobody counts as gone there: the last holder may live."""
    path = RunFolder(tmp_path).learner_lock
    with hold_lock(path, "learner"):
        before = path.read_text()

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with capture_logs() as logs, hold_lock(path, "learner", leased=True) as gone:
        assert (gone, path.read_text()) == ([], before)
    assert "No lock works" in logs[0]["event"]
    with pytest.raises(ConfigError, match="No lock works"), hold_lock(path, "`penstock up`"):
        pass


def test_a_killed_learner_leaves_the_folder_free(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from penstock.common.files.run_folder import RunFolder\n"
        "from penstock.common.files.lock import hold_lock\n"
        "with hold_lock(RunFolder(Path(sys.argv[1])).learner_lock, 'learner'): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    with hold_lock(RunFolder(tmp_path).learner_lock, "learner"):
        pass


def test_a_learner_stopped_between_its_two_claims_does_not_cut_off_its_successor(tmp_path):
    number = next_incarnation(RunFolder(tmp_path), 0)
    successor = claim_incarnation(LearnerFolder(tmp_path, number + 1))
    with pytest.raises(RunTaken, match="incarnation 2 of the learner holds the run's folder"):
        claim_incarnation(LearnerFolder(tmp_path, number))
    assert read_claims(RunFolder(tmp_path)) == {2: successor}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(b"{", "damaged"), (b"{}", "damaged"), (LOOP, "damaged"), (None, "is missing")],
)
def test_a_claim_that_is_damaged_or_gone_is_named_before_anything_is_claimed(
    tmp_path, damage, complaint
):
    for _ in range(3):
        claim_next(tmp_path)
    path = RunFolder(tmp_path).claim(2)
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(ConfigError, match=f"{complaint}.*Put the file back"):
        claim_next(tmp_path)
    assert not RunFolder(tmp_path).claim(4).exists()


def test_a_last_record_that_is_whole_in_length_and_wrong_in_content_is_an_error(tmp_path):
    Journal(LearnerFolder(tmp_path, 1)).append("batch", step=1)
    path = RunFolder(tmp_path).segment(1, 0)
    data = path.read_bytes()
    for found, level in ((data[:-1] + bytes([data[-1] ^ 1]), "error"), (data[:-1], "warning")):
        path.write_bytes(found)
        with capture_logs() as logs:
            valid_length(RunFolder(tmp_path), 1)
        assert [entry["log_level"] for entry in logs] == [level]
