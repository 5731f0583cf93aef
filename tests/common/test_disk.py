"""A disk that is full: waited for, said, given up; and files that are as they were before."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import penstock.common.deadline
from penstock.common import errors
from penstock.common.config.command import Command, execute_command
from penstock.common.errors import NEVER_RESTARTED, DiskFailed, DiskFull
from penstock.common.files.atomic import append_whole, make_folder, whole_folder, write_whole
from penstock.common.files.disk import Disk
from penstock.common.phases import Phases
from tests.small_disk import Meanwhile


class Failing:
    """Raises these errors, one per call, then succeeds."""

    def __init__(self, *errors: Exception):
        self.errors, self.calls = list(errors), 0

    def __call__(self, *_: object, **__: object) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "written"


def full(code: int = errno.ENOSPC) -> OSError:
    return OSError(code, os.strerror(code), "file")


def waiting(disk_is_full: Failing, timeout_s: float = 600, needed: int | None = None, path=None):
    stopping = Meanwhile(lambda: None)
    disk = Disk(timeout_s, stopping)
    return stopping, lambda: disk.write("a record", path, disk_is_full, needed)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_waits_until_there_is_room(tmp_path, code):
    action = Failing(full(code), full(code))
    stopping, write = waiting(action, path=tmp_path / "x")
    assert (write(), action.calls, stopping.waits) == ("written", 3, 2)


def test_an_error_that_only_names_a_full_disk_is_one(tmp_path):
    action = Failing(RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)"))
    assert waiting(action, path=tmp_path / "x")[1]() == "written"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EROFS, errno.EUCLEAN, errno.EBADMSG])
@pytest.mark.parametrize("kind", [full, lambda code: RuntimeError(f"I/O error (os error {code})")])
def test_a_broken_disk_is_named_with_the_file_and_what_is_safe(tmp_path, kind, code):
    action = Failing(kind(code))
    with pytest.raises(DiskFailed, match="a record cannot be written to") as caught:
        waiting(action, path=tmp_path / "x")[1]()
    assert action.calls == 1
    for told in (str(tmp_path / "x"), "acknowledged before is whole", "start again to resume"):
        assert told in str(caught.value)
    assert caught.value.exit_code not in NEVER_RESTARTED


def test_a_role_whose_file_cannot_be_read_says_which(capsys):
    class Broken(Command):
        def execute(self) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/runs/x/journal")

    assert execute_command(Broken, "learner", []) == DiskFailed.exit_code
    assert "/runs/x/journal cannot be read or written: Stale file handle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "file", "expected"),
    [
        (errno.EDQUOT, "/a/claim", errors.DiskFull),
        (errno.ENOSPC, None, errors.DiskFull),
        (errno.EUCLEAN, "/a/claim", DiskFailed),
        (errno.ETIMEDOUT, "/nfs/claim", DiskFailed),
        (errno.ETIMEDOUT, None, None),
    ],
)
@pytest.mark.parametrize("role", ["learner", "actor"])
def test_a_disk_that_fails_where_nobody_waits_ends_any_role_with_its_code(
    capsys, role, code, file, expected
):
    class Fails(Command):
        def execute(self) -> int:
            raise OSError(code, os.strerror(code), file)

    if expected is None:  # of a network
        with pytest.raises(TimeoutError):
            execute_command(Fails, role, [])
    else:
        is_worker = role == "actor"  # a worker is started again: its full disk is not the run's
        kind = DiskFailed if is_worker else expected
        assert execute_command(Fails, role, []) == kind.exit_code
        assert (file or "Make room") in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_folder_on_a_broken_disk_is_not_called_the_users_choice(tmp_path, monkeypatch, code):
    monkeypatch.setattr(Path, "mkdir", Failing(full(code)))
    with pytest.raises(DiskFailed, match="file cannot be read or written"):
        make_folder(tmp_path / "x")


@pytest.mark.parametrize("error", [OSError(errno.EPERM, "not permitted"), ValueError("no")])
def test_other_errors_are_not_waited_for(tmp_path, error):
    action = Failing(error)
    with pytest.raises(type(error)):
        waiting(action, path=tmp_path / "x")[1]()
    assert action.calls == 1


def test_the_wait_names_file_and_missing_room_once_in_half_a_minute(tmp_path):
    action = Failing(*[full()] * 5)
    with capture_logs() as logs:
        waiting(action, needed=7, path=tmp_path / "x")[1]()
    (entry,) = logs
    assert (entry["log_level"], entry["what"], entry["path"]) == (
        "error",
        "a record",
        str(tmp_path / "x"),
    )
    assert (entry["needed_bytes"], entry["missing_bytes"], entry["limit_s"]) == (7, 0, 600)


def test_each_round_of_the_wait_is_a_sign_of_life(tmp_path):
    phases: list[str] = []

    def note(name: str) -> AbstractContextManager[None]:
        phases.append(name)
        return nullcontext()

    stopping = Meanwhile(lambda: None)
    Disk(600, stopping, Phases(trace=note)).write("a record", tmp_path / "x", Failing(full(), full()))
    assert phases == ["waiting for room on the disk"] * 2


def test_the_wait_is_said_again(tmp_path, monkeypatch):
    monkeypatch.setattr(penstock.common.deadline, "REPORT_EVERY_S", 0.0)
    with capture_logs() as logs:
        waiting(Failing(*[full()] * 5), path=tmp_path / "x")[1]()
    assert len(logs) == 5


def test_a_disk_that_stays_full_ends_with_what_is_missing_and_what_to_do(tmp_path):
    action = Failing(*[full()] * 5)
    huge = 10**18
    with pytest.raises(DiskFull, match="a record") as raised:
        waiting(action, timeout_s=0, needed=huge, path=tmp_path / "x")[1]()
    for part in (
        str(tmp_path / "x"),
        f"needed bytes {huge}",
        "missing bytes",
        "RUN_DISK_TIMEOUT_S=0",
        "make room",
    ):
        assert part in str(raised.value)
    assert action.calls == 1


def test_a_write_for_which_there_is_no_room_is_not_tried_meanwhile(tmp_path):
    action = Failing(*[full()] * 5)
    stopping = Meanwhile(lambda: stopping.waits == 3 and stopping.set())
    with pytest.raises(DiskFull, match="stopped by a signal"):
        Disk(600, stopping).write("a record", tmp_path / "x", action, 10**18)
    assert (action.calls, stopping.waits) == (1, 3)


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "x"
    with path.open("ab", buffering=0) as file:
        append_whole(file, b"first", 0)
        monkeypatch.setattr(os, "fsync", Failing(full()))
        with pytest.raises(OSError, match="No space left"):
            append_whole(file, b"second", 5)
        assert path.read_bytes() == b"first"
        monkeypatch.undo()
        append_whole(file, b"third", 5)
    assert path.read_bytes() == b"firstthird"


def test_what_could_not_be_cut_back_is_cut_off_by_the_next_attempt(tmp_path, monkeypatch):
    path = tmp_path / "x"
    with path.open("ab", buffering=0) as file:
        append_whole(file, b"first", 0)
        file.write(b"sec")  # where there is no room to cut back either
        append_whole(file, b"second", 5)
    assert path.read_bytes() == b"firstsecond"


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    write_whole(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", Failing(full()))
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "x", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]


def test_a_folder_that_cannot_be_synced_is_not_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Failing(full()))
    with pytest.raises(OSError, match="No space left"), whole_folder(tmp_path / "x") as aside:
        (aside / "file").write_bytes(b"new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sync", [True, False])
def test_only_what_must_survive_a_power_cut_is_synced(tmp_path, monkeypatch, sync):
    synced = []
    monkeypatch.setattr("penstock.common.files.atomic.sync_path", synced.append)
    with whole_folder(tmp_path / "x", sync) as aside:
        (aside / "file").write_text("whole")
    assert (tmp_path / "x" / "file").read_text() == "whole"
    assert bool([path for path in synced if path.name == "file"]) == sync


WORKS = """
import errno, sys, threading
from pathlib import Path
from penstock.common import errors
from penstock.common.broker.lease_keeper import KeeperThread
from penstock.common.config.command import Command, execute_command
from penstock.common.files.disk import Disk
from penstock.common.log import configure_logs, get_logger

def fail(error):
    raise error

class Works(Command):
    def execute(self):
        configure_logs("learner", "text")
        failures = [OSError(errno.ENOSPC, "full")] * 2
        Disk(600.0).write("x", Path("x"), lambda: failures and fail(failures.pop()))
        kept, calls = threading.Event(), []
        def keep():
            calls.append(1)
            len(calls) > 2 and kept.set()
            fail(errors.ServerUnavailable("away"))
        keeper = KeeperThread("leases", 0.01, keep)
        keeper.start()
        assert kept.wait(60)
        keeper.check()
        keeper.stop()
        get_logger("x").info("left")
        return fail(getattr(errors, KIND)("why")) if KIND else 0

KIND = sys.argv.pop()
sys.exit(execute_command(Works, "works"))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("kind", ["", "DiskFull", "DiskFailed", "ConfigError"])
def test_lines_for_which_there_is_no_room_change_nothing_else(kind, unbuffered):
    """Standard error is on the full disk too. The thread of the leases works on."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", WORKS, kind]
    with Path("/dev/full").open("w") as file:
        ended = subprocess.run(command, stderr=file, env=environment, timeout=300, check=False)
    assert ended.returncode == (getattr(errors, kind).exit_code if kind else 0)
