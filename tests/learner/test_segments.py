"""A journal in several files: damage in any of them, and what may be deleted."""

from __future__ import annotations

import os
import re
import struct

import pytest
from structlog.testing import capture_logs

from penstock.common.errors import ConfigError
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal import segments
from penstock.common.journal.claims import Position, read_chain
from penstock.common.journal.segments import (
    left_out,
    list_segments,
    read_journal,
    segments_before,
    valid_length,
)
from penstock.learner.state.journal import Journal
from tests.judge import read_records
from tests.learner.builders import claim_next

RECORD = 600  # bytes that do not shrink, so that two records fill a file


def noise(step: int) -> bytes:
    return b"".join(hash((step, i)).to_bytes(8, "little", signed=True) for i in range(RECORD // 8))


class Written:
    """An incarnation with six records in three files, and the position after each."""

    def __init__(self, folder):
        self.folder = folder
        self.run_folder = RunFolder(folder)
        self.claim = claim_next(folder)
        self.journal = Journal(LearnerFolder(folder, self.claim.incarnation), segment_bytes=3 * RECORD)
        self.positions = [self.append(step) for step in range(1, 7)]

    def append(self, step: int) -> Position:
        return self.journal.append("batch", step=step, groups=[noise(step)])

    @property
    def segments(self):
        return list_segments(self.run_folder, self.claim.incarnation)

    def flip(self, step: int, byte: int = 20):
        """Flip a bit of a step's record: by default in its body, 0 to 7 is its length."""
        offset = self.positions[step - 2].offset if step > 1 else 0
        segment = [segment for segment in self.segments if segment.start <= offset][-1]
        data = bytearray(segment.path.read_bytes())
        data[offset - segment.start + byte] ^= 1
        segment.path.write_bytes(data)
        return segment.path, offset - segment.start


@pytest.fixture
def written(tmp_path):
    return Written(tmp_path)


def steps(folder, claim, start=None):
    return [record["step"] for _, record in read_chain(RunFolder(folder), claim, start)]


def said(logs, level):
    return [entry for entry in logs if entry["log_level"] == level]


def test_files_stay_within_their_size_and_are_named_by_where_they_begin(written):
    assert [segment.start for segment in written.segments] == [
        0, written.positions[1].offset, written.positions[3].offset,
    ]  # fmt: skip
    for segment in written.segments:
        assert segment.path.stat().st_size <= 3 * RECORD
        assert segment.path.name == f"000001-{segment.start:012d}.journal"
    assert written.segments[-1].end == written.positions[-1].offset


def test_a_record_larger_than_a_file_has_one_of_its_own(tmp_path):
    run_folder = RunFolder(tmp_path)
    journal = Journal(LearnerFolder(tmp_path, 1), segment_bytes=10)
    positions = [journal.append("batch", step=step) for step in (1, 2)]
    assert [segment.end for segment in list_segments(run_folder, 1)] == [p.offset for p in positions]


def test_records_are_read_across_files_from_any_position_to_any_other(written):
    offsets = [0, *(position.offset for position in written.positions)]
    for first in range(7):
        for last in range(first, 7):
            records = read_journal(written.run_folder, 1, offsets[first], offsets[last])
            assert [record["step"] for _, record in records] == list(range(first + 1, last + 1))


def test_the_judge_reads_the_same_records(written):
    claim_next(written.folder)
    assert [record["step"] for _, record in read_records(written.folder)] == [1, 2, 3, 4, 5, 6]


def test_payload_that_repeats_itself_is_compressed(tmp_path):
    position = Journal(LearnerFolder(tmp_path, 1)).append("batch", groups=[bytes(range(100)) * 100])
    assert position.offset < 1000


def test_a_torn_record_in_the_last_file_is_cut_and_said(written):
    last = written.segments[-1].path
    last.write_bytes(last.read_bytes()[:-3])
    with capture_logs() as logs:
        assert valid_length(written.run_folder, 1) == written.positions[4].offset
    (entry,) = said(logs, "warning")
    assert (entry["file"], said(logs, "error")) == (str(last), [])


@pytest.mark.parametrize(
    "byte", [20, 9, 0, 2], ids=["body", "checksum", "length", "length beyond the end"]
)
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_damage_before_other_records_is_said_with_file_and_place(written, step, byte):
    path, place = written.flip(step, byte)
    with capture_logs() as logs:
        whole = written.positions[step - 2].offset if step > 1 else 0
        assert valid_length(written.run_folder, 1) == whole
    (entry,) = said(logs, "error")
    assert (entry["file"], entry["offset"]) == (str(path), place)
    assert entry["bytes_left_out"] == written.positions[-1].offset - whole
    with pytest.raises(ConfigError, match=rf"truncate -s {place} {re.escape(str(path))}"):
        claim_next(written.folder)
    os.truncate(path, place)
    for later in [segment.path for segment in written.segments if segment.path > path]:
        later.unlink()
    assert steps(written.folder, claim_next(written.folder)) == list(range(1, step))


def test_a_record_that_is_finished_meanwhile_is_no_damage(written):
    """A replay of a live run reads half a record, and finds it whole, with another behind it."""
    found = left_out(written.run_folder, 1, written.positions[3].offset)
    assert found is not None
    assert found.torn


def test_a_file_that_is_missing_in_the_middle_is_said(written):
    written.segments[1].path.unlink()
    with capture_logs() as logs:
        assert valid_length(written.run_folder, 1) == written.positions[1].offset
    assert len(said(logs, "error")) == 1


def test_damage_before_the_checkpoint_costs_a_resume_nothing(written):
    written.flip(2)
    checkpointed = written.positions[2]
    claim = claim_next(written.folder, checkpointed)
    assert claim.parent_length == written.positions[-1].offset
    assert steps(written.folder, claim, checkpointed) == [4, 5, 6]
    with pytest.raises(
        ConfigError, match=r"000001-000000000000\.journal: damaged or cut off at byte \d+"
    ):
        steps(written.folder, claim)


def test_damage_in_an_older_incarnation_is_never_read_over(written):
    second = claim_next(written.folder)
    Journal(LearnerFolder(written.folder, second.incarnation)).append("batch", step=7)
    third = claim_next(written.folder)
    assert steps(written.folder, third) == [1, 2, 3, 4, 5, 6, 7]
    written.flip(6)
    with pytest.raises(ConfigError, match="journal of incarnation 1 is needed from offset"):
        steps(written.folder, third)


def test_what_lies_before_a_position_are_whole_files_and_older_incarnations(written):
    files = [segment.path for segment in written.segments]
    assert segments_before(written.run_folder, 1, written.positions[0].offset) == []
    assert segments_before(written.run_folder, 1, written.positions[1].offset) == files[:1]
    assert segments_before(written.run_folder, 1, written.positions[4].offset) == files[:2]
    assert segments_before(written.run_folder, 1, written.positions[5].offset) == files[:2]
    Journal(LearnerFolder(written.folder, 2))
    assert segments_before(written.run_folder, 2, 0) == files


def test_a_journal_without_its_beginning_is_read_from_a_position_and_refused_from_the_start(written):
    for path in segments_before(written.run_folder, 1, written.positions[2].offset):
        path.unlink()
    with pytest.raises(ConfigError, match="is needed from offset 0"):
        claim_next(written.folder)
    assert len(list(written.run_folder.claims.iterdir())) == 1
    start = written.positions[3]
    claim = claim_next(written.folder, start)
    assert steps(written.folder, claim, start) == [5, 6]
    begins = written.positions[1].offset
    with pytest.raises(ConfigError, match=f"begins at offset {begins}.*LEARNER_JOURNAL_RETENTION=all"):
        steps(written.folder, claim)


def test_the_search_for_records_after_damage_has_an_end(tmp_path, monkeypatch):
    """A file full of lengths would take a checksum at each: 64 MiB took hours."""
    monkeypatch.setattr(segments, "_MOST_CHECKED", 1 << 20)
    folder = RunFolder(tmp_path)
    folder.journal.mkdir()
    folder.segment(1, 0).write_bytes(struct.pack("<Q", 1 << 14) * (1 << 13))
    rest = left_out(folder, 1, 0)
    assert rest is not None
    assert not rest.torn
