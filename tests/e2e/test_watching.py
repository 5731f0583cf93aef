"""What a person sees of a run: the live screen of `penstock up`, and `queues watch` from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.site import FAKE_PROCFILE, ROOT
from tests.e2e.terminal import TerminalSite
from tests.helpers import wait_until
from tests.small_disk import mounted

pytestmark = pytest.mark.e2e

WITHIN_S = 50  # five times what is promised


class Watching:
    """`queues watch --json` of a site's run, whose newest look is `last`."""

    def __init__(self, site: TerminalSite) -> None:
        self.last: dict[str, Any] = {}
        self._site = site
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.common.queues", "watch", "--json"],
            cwd=ROOT, env=os.environ | site.variables, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last = json.loads(line)

    def and_the_screen_say(self, words: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until screen and watch say `words`; `meanwhile` is called before each look."""

        def says(text: str) -> bool:
            meanwhile()
            return words in text

        shown, where = self._site.shown, f"{words!r} on the screen"
        self._site.wait_for(lambda: says(" ".join(shown())), where, WITHIN_S)
        wait_until(lambda: says(self.last.get("limit", "")), words, WITHIN_S)

    def end(self) -> None:
        """End it, and check that it ended well."""
        self._process.terminate()
        assert self._process.wait(WITHIN_S) == 0


def test_the_screen_and_the_watch_name_what_stops_a_run(tmp_path: Path) -> None:
    """One run after another fault; both name each within seconds, and that work goes on afterwards."""
    with mounted(tmp_path / "disk", 40_000) as disk:
        site = TerminalSite(
            tmp_path, FAKE_PROCFILE, 100, 30,
            RUN_DIR=str(disk.folder), LEARNER_EVAL_DATASET="", LEARNER_MAX_STEPS="100000",
            RUN_LEASE_S="10", FAKE_TOKEN_DELAY_S="0.1", RUN_DISK_TIMEOUT_S="600",
        )  # fmt: skip
        site.run_folder = disk.folder / "e2e"
        with site.start():
            site.wait_for(lambda: site.steps() >= 3, "three steps")
            watching = Watching(site)

            both_say = watching.and_the_screen_say
            both_say("the limit")
            workers = watching.last["workers"]
            assert {one["role"] for one in workers.values()} == {"actor", "rewarder"}
            with slowed(pid_of(site, "learner")):
                both_say("The learner is the limit")
            for role, words in (
                ("rewarder", "No rewarder is running"),
                ("actor", "No actor is running"),
                ("learner", "No heartbeat from the learner"),
            ):
                pid = pid_of(site, role)
                os.kill(pid, signal.SIGSTOP)
                both_say(words)
                assert any("gone, " in line for line in site.shown()) or role == "learner"
                os.kill(pid, signal.SIGCONT)
                both_say("the limit")
            both_say("The queue server cannot write its file", meanwhile=disk.fill)  # others free some
            disk.clear()
            both_say("the limit")
            site.resize(80, 24)
            site.wait_for(
                lambda: "reward" in site.shown()[1] and len(site.shown()[0]) <= 80, "80 columns"
            )
            os.kill(site.process.pid, signal.SIGINT)
            assert site.wait(60 * 5) == 0
            gone = "Waiting for the queue server"  # it leaves right after the learner
            wait_until(lambda: gone in watching.last["limit"], gone, WITHIN_S)
            watching.end()
    assert b"\x1b[?1049h" in site.written  # the screen of its own, and back from it
    assert b"\x1b[?1049l" in site.written
    assert any("after" in line for line in site.shown()), "\n".join(site.shown())


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    """The actor would need 15 s to give its work back, as one does whose completions are long."""
    site = TerminalSite(
        tmp_path, FAKE_PROCFILE, 80, 24, LEARNER_EVAL_DATASET="", FAKE_TOKEN_DELAY_S="1000"
    )
    log = site.run_folder / "logs" / "actor.1.log"
    with site.start():
        site.wait_for(lambda: log.is_file() and " joined run" in log.read_text(), "the actor")
        site.wait_for(lambda: re.search(r"1 actor \([1-9]", " ".join(site.shown())), "its tickets")
        pids = [pid_of(site, role) for role in ("learner", "actor", "rewarder")]
        os.kill(site.process.pid, signal.SIGINT)
        site.wait_for(lambda: any("topping" in line for line in site.shown()), "that it stops")
        os.kill(site.process.pid, signal.SIGINT)
        site.wait(WITHIN_S)
    assert "Killed by SIGKILL" in log.read_text()
    assert not any(map(psutil.pid_exists, pids))
    wait_until(lambda: b"\x1b[?1049l" in site.written, "the terminal as it was")
    assert b"\x1b[?25h" in site.written


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Let the process run for a fiftieth of the time."""
    ended = threading.Event()

    def pause() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(2.45)
            os.kill(pid, signal.SIGCONT)
            ended.wait(0.05)

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def pid_of(site: TerminalSite, role: str) -> int:
    """The process id of the role's first process, as its log says."""
    log = (site.run_folder / "logs" / f"{role}.1.log").read_text()
    return int(log.rpartition("-- Started as process ")[2].partition(".")[0])
