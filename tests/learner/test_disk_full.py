"""A run on a file system that is full at times: it waits, or ends with all that is old whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.common.errors import DiskFailed, DiskFull
from penstock.common.files.disk import Disk
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.segments import list_segments, read_journal, valid_length
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Version
from penstock.learner.data.plan import resolve_model
from penstock.learner.data.reward_specs import resolve_reward_model
from penstock.learner.data.sources import Source, load_rows
from penstock.learner.report.recorder import Recorder
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.learner.state.versions import write_version
from penstock.learner.streams.commit import CommitLog
from tests.judge import judge
from tests.learner import trained as training
from tests.learner.trained import same, weights_of
from tests.learner.whole import FakePolicy, Run, Worker
from tests.small_disk import Meanwhile, mounted


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", kib=1024) as disk:
        yield disk


class FillingPolicy(FakePolicy):
    """Fills the disk once, in its second call of the method named."""

    def __init__(self, disk, place: str):
        super().__init__()
        self.disk, self.place, self.calls = disk, place, 0

    def fill(self, place: str):
        self.calls += place == self.place
        if place == self.place and self.calls == 2:
            self.disk.fill()
            self.calls += 1

    def update(self, batch, step):
        self.fill("update")
        return super().update(batch, step)

    def export(self, folder, form="checkpoint"):
        self.fill("export")
        super().export(folder)

    def save(self, folder):
        self.fill("save")
        super().save(folder)
        (folder / "optimizer").write_bytes(bytes(9000))


@pytest.fixture
def run(small_disk, connection, keys, queue_server):
    worker = Worker(queue_server.url, keys)
    worker.start()
    yield Run(small_disk.folder / "run", connection, keys)
    worker.leaving.set()
    worker.join()


PLACES = {"update": "weights of a version", "export": "weights of a version", "save": "a checkpoint"}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_when_there_is_room_again(run, small_disk, place):
    stopping = Meanwhile(small_disk.clear)
    policy = FillingPolicy(small_disk, place)
    with capture_logs() as logs:
        run.start(steps=4, policy=policy, stopping=stopping, save_steps=1)
    (entry,) = [entry for entry in logs if entry["event"].startswith("No room")]
    assert PLACES[place] in entry["what"]
    assert stopping.waits == 1
    assert policy.updates == 4
    run.check()


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_waited_in_vain_ends_and_is_resumed_without_a_loss(run, small_disk, place):
    with pytest.raises(DiskFull, match=PLACES[place]):
        run.start(steps=4, policy=FillingPolicy(small_disk, place), disk_timeout_s=0, save_steps=1)
    small_disk.clear()
    done = len([1 for _, record in read_journal(run.run_folder, 1) if record["kind"] == "batch"])
    assert 1 <= done < 4
    run.start(steps=4, save_steps=1)
    assert judge(run.folder)["resumed_at"] == [done]
    run.check()


@pytest.mark.parametrize("call", ["open", "mkdir"])
def test_a_file_or_folder_that_cannot_even_be_made_is_waited_for(tmp_path, monkeypatch, call):
    """Some file systems need room, or look at the quota, when a file is opened."""
    real, full = getattr(Path, call), [True]

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if full and arguments[:1] != ("rb",):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, call, fail)
    stopping = Meanwhile(full.clear)
    recorder = Recorder(LearnerFolder(tmp_path, 1, Disk(600, stopping)), [], "run")
    if call == "open":
        recorder.metrics(1, {"reward": 0.5})
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward": 0.5}\n'
    else:
        recorder.completions(1, lambda: [{"reward": 0.5}])
        assert len(list((tmp_path / "completions").iterdir())) == 1
    assert stopping.waits == 1


def test_a_record_that_found_no_room_is_written_whole_when_there_is(small_disk):
    stopping = Meanwhile(small_disk.clear)
    journal = Journal(LearnerFolder(small_disk.folder, 1, Disk(600, stopping)))
    first = journal.append("batch", step=1)
    small_disk.fill()
    payload = os.urandom(20_000)
    with capture_logs() as logs:
        second = journal.append("batch", step=2, payload=payload)
    (entry,) = logs
    assert entry["missing_bytes"] == entry["needed_bytes"] > 20_000
    assert entry["path"] == str(list_segments(RunFolder(small_disk.folder), 1)[0].path)
    records = list(read_journal(RunFolder(small_disk.folder), 1))
    assert [offset for offset, _ in records] == [first.offset, second.offset]
    assert records[1][1]["payload"] == payload


def test_a_record_that_never_found_room_leaves_no_trace(small_disk):
    journal = Journal(LearnerFolder(small_disk.folder, 1))
    first = journal.append("batch", step=1)
    small_disk.fill()
    with pytest.raises(DiskFull, match="record of 'batch'"):
        journal.append("batch", payload=os.urandom(20_000))
    (segment,) = list_segments(RunFolder(small_disk.folder), 1)
    assert segment.end == first.offset == valid_length(RunFolder(small_disk.folder), 1)
    small_disk.clear()
    journal.append("batch", step=2)
    assert [record["step"] for _, record in read_journal(RunFolder(small_disk.folder), 1)] == [1, 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_a_record_half_written_is_cut_back_before_it_is_tried_again(
    tmp_path, monkeypatch, code, failing
):
    sizes = []
    run_folder = RunFolder(tmp_path)
    disk = Disk(600, Meanwhile(lambda: sizes.append(segment().end)))
    journal = Journal(LearnerFolder(tmp_path, 1, disk))
    first = journal.append("batch", step=1)

    def segment():
        return list_segments(run_folder, 1)[0]

    if failing == "write":
        journal._file = HalfWriting(journal._file, code)
    else:
        real, monkeypatch_calls = os.fsync, []

        def fsync(handle):
            monkeypatch_calls.append(handle)
            if len(monkeypatch_calls) == 1:
                assert segment().end > first.offset
                raise OSError(code, os.strerror(code))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)
    second = journal.append("batch", step=2)
    assert sizes == [first.offset]
    assert [offset for offset, _ in read_journal(RunFolder(tmp_path), 1)] == [
        first.offset,
        second.offset,
    ]


class HalfWriting:
    """A file whose first write stores three bytes, whose second fails."""

    def __init__(self, file, code: int):
        self._file, self._code, self._writes = file, code, 0

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def write(self, data) -> int:
        self._writes += 1
        if self._writes == 2:
            raise OSError(self._code, os.strerror(self._code))
        return self._file.write(data[:3] if self._writes == 1 else data)


def test_a_new_file_of_the_journal_waits_for_room_too(tmp_path, monkeypatch):
    stopping = Meanwhile(monkeypatch.undo)
    journal = Journal(LearnerFolder(tmp_path, 1, Disk(600, stopping)), segment_bytes=1)
    journal.append("batch", step=1)
    monkeypatch.setattr(os, "fsync", refuse)
    journal.append("batch", step=2)
    assert stopping.waits == 1
    assert [record["step"] for _, record in read_journal(RunFolder(tmp_path), 1)] == [1, 2]
    assert len(list_segments(RunFolder(tmp_path), 1)) == 2


@pytest.mark.usefixtures("one_thread")
class TestRealWeights:
    """What torch and safetensors do on a full disk."""

    @pytest.fixture
    def trained(self, small_disk, model_folder):
        run = training.Run(small_disk.folder, model_folder)
        run.checkpoint(1, run.step(0))
        return run

    def test_a_checkpoint_waits_for_room(self, trained, small_disk, model_folder):
        position = trained.step(1)
        small_disk.fill()
        stopping = Meanwhile(small_disk.clear)
        trained.checkpoint(2, position, Disk(600, stopping))
        assert stopping.waits == 1
        past, policy = trained.resume(model_folder)
        assert (past.step, past.retrained) == (2, 0)
        assert same(weights_of(policy), weights_of(trained.policy))

    def test_the_optimizers_state_waits_too(self, trained, small_disk, monkeypatch):
        """Torch's own error does not say that the disk is full."""
        save = trained.policy.save
        monkeypatch.setattr(trained.policy, "save", lambda folder: (small_disk.fill(), save(folder)))
        stopping = Meanwhile(lambda: (small_disk.clear(), monkeypatch.undo()))
        checkpoint = trained.checkpoint(2, trained.step(1), Disk(600, stopping))
        assert stopping.waits == 1
        assert trained.newest_checkpoint() == checkpoint

    def test_one_that_finds_none_leaves_the_old_one_whole(self, trained, small_disk, model_folder):
        position = trained.step(1)
        small_disk.fill()
        with pytest.raises(DiskFull, match=r"a checkpoint in .*000001-00000002 \(free bytes 0, needed"):
            trained.checkpoint(2, position)
        assert [path.name for path in (trained.folder / "checkpoints").iterdir()] == ["000001-00000001"]
        small_disk.clear()
        past, policy = trained.resume(model_folder)
        assert (past.step, past.retrained) == (2, 1)
        assert same(weights_of(policy), weights_of(trained.policy))

    def test_a_version_waits_for_room(self, trained, small_disk):
        small_disk.fill()
        stopping = Meanwhile(small_disk.clear)
        folder = LearnerFolder(trained.folder, 1, Disk(600, stopping))
        weights = write_version(folder, trained.policy, Version(1, 1), "")
        assert stopping.waits == 1
        assert [path.name for path in (trained.folder / "versions").iterdir()] == ["000001-00000001"]
        assert weights.version == Version(1, 1)


class Closed:
    """A queue that only remembers what it was told to close."""

    def __init__(self):
        self.tickets: list[str] = []

    def close(self, _purpose, states, _entries):
        self.tickets += states


def test_nothing_is_acknowledged_before_its_record_is_synced(tmp_path, monkeypatch):
    queue, ledger = Closed(), Ledger()
    stopping = Meanwhile(lambda: waited.append(list(queue.tickets)) or monkeypatch.undo())
    waited: list[list[str]] = []
    commit_log = CommitLog(ledger, Journal(LearnerFolder(tmp_path, 1, Disk(600, stopping))), queue)
    ledger.opened(ledger.next_train_ticket(), Version(1, 0))
    ledger.close(TicketId("train:0"), "trained", "step 1")
    monkeypatch.setattr(os, "fsync", refuse)
    commit_log.record("batch")
    assert (waited, queue.tickets) == ([[]], ["train:0"])


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_disk_that_broke_is_not_called_the_users_mistake(tmp_path, monkeypatch, code):
    """A restart may help, and follows: data set, model and reward model may be right."""

    def broken(*_, **__):
        raise OSError(code, os.strerror(code), "a file")

    monkeypatch.setattr("penstock.learner.data.sources._load", broken)
    monkeypatch.setattr("penstock.learner.data.reward_specs.hash_model", broken)
    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    calls = (
        lambda: load_rows(Source("rows.jsonl"), "train", 0),
        lambda: resolve_reward_model("helpful", str(tmp_path), 1.0),
        lambda: resolve_model("org/model"),
    )
    for call in calls:
        with pytest.raises(DiskFailed, match="a file cannot be read or written"):
            call()


def refuse(_handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
