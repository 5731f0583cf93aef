"""Rules of docs/protocol.md, taken out one at a time: each must end a run with the verdict written here.

    python -m tests.crashes.mutants [NAME ...]

A mutant is a copy of the sources with a few texts replaced. Its scenario is also tried on the sources
as they are, and must end sound there. All runs are forked from a process that has imported everything;
for a mutant, the fork imports the sources again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.crashes import scenarios
from tests.crashes.scenarios import Scenario, dies_at
from tests.crashes.world import in_new_folder, prepare_model

ROOT = Path(__file__).parents[2]
_PACKAGES = ("penstock", "common", "learner", "actors", "rewarders", "deploy", "tests")

_TRIES = 5
"""Runs without a rule in which its verdict has to come: the first harm is a matter of timing."""
_STUCK_S = 25.0
"""For a run without its rule that is expected to get stuck; with the rule it takes four seconds."""
_LIMIT_S = 300  # for a run that takes some ten seconds

Edit = tuple[str, str, str]
"""A file, a text in it, and what comes in its place."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule that is taken out by edits, the scenario that shows it, and its verdict."""

    rule: int
    why: str
    edits: tuple[Edit, ...]
    scenario: Scenario
    verdict: str


MUTANTS: dict[str, Mutant] = {
    "issues what is alive": Mutant(
        1,
        "a resumed learner issues a ticket again while its group is on its way",
        (("common/broker/functions.lua", "alive = find_own(ticket, stream, entry)", "alive = false"),),
        scenarios.learner_dies_before_slow_actors,
        "twice",
    ),
    "forgets what is closed": Mutant(
        2,
        "a group that was trained, but not acknowledged, is read again and trained again",
        (
            (
                "learner/streams/intake.py",
                "if entry.ticket not in self._ledger.open or entry.ticket in self.held:",
                "if entry.ticket in self.held:",
            ),
            ("learner/state/ledger.py", "del self.open[ticket]", "self.open.pop(ticket, None)"),
            ("learner/streams/refusal.py", "self._asked(ticket)", "outcome.group.ticket"),
            (
                "learner/streams/ticket_flow.py",
                "[name for name, (first, _) in places.tickets.items() if self._is_other(name, first)]",
                "[]",
            ),
            # Rule 26 would join again and again, as long as the ticket is open on the server alone.
            ("learner/streams/ticket_flow.py", "if time.monotonic() < self._check_at:", "if True:"),
        ),
        dies_at("learner", "close.before", 4, at_max_staleness="drop", max_staleness=4),
        "twice",
    ),
    "credit does not return at the verdict": Mutant(
        3,
        "filtered groups never report back, and no ticket is issued any more",
        (
            (
                "learner/streams/intake.py",
                'self._ledger.close(entry.ticket, "filtered", outcome.reason)',
                "pass",
            ),
        ),
        scenarios.calm,
        "stuck",
    ),
    "acknowledges before the journal": Mutant(
        5,
        "a kill between the two loses the payload",
        (
            (
                "learner/streams/commit.py",
                "        self.position = self._journal.append(",
                "        self._acknowledge(ends)\n        self.position = self._journal.append(",
            ),
        ),
        dies_at("learner", "journal.before", 7),
        "lost",
    ),
    "resumes from the checkpoint alone": Mutant(
        7,
        "what was trained after the checkpoint is trained again, on other data",
        (
            (
                "learner/resume.py",
                "in read_chain(run_folder, claim, checkpoint.position if checkpoint else None):",
                "in ():",
            ),
        ),
        dies_at("learner", "updated", 4),
        "twice",
    ),
    "trusts a damaged checkpoint": Mutant(
        8,
        "the learner goes on from weights that nobody trained",
        (("learner/state/checkpoint.py", "if not has_hash(path, expected):", "if False:"),),
        scenarios.checkpoint_is_damaged,
        "other weights",
    ),
    "trusts a server that came back": Mutant(
        9,
        "tickets that the server forgot are waited for in vain",
        (
            (
                "learner/streams/ticket_flow.py",
                "return self._connection.restarts != self._restarts or self._queue.damaged",
                "return False",
            ),
        ),
        scenarios.server_is_rolled_back,
        "stuck",
    ),
    "no fence": Mutant(
        11,
        "a stopped learner goes on beside its successor, and issues what that has ended",
        (
            (
                "common/broker/functions.lua",
                "  local current = redis.call('HGET', fence, 'incarnation')\n  if not current",
                "  local current = incarnation\n  if not current",
            ),
        ),
        scenarios.stopped_learner_goes_on,
        "twice",
    ),
    "acknowledges before it hands off": Mutant(
        13,
        "an actor that dies between the two loses the group",
        (
            (
                "common/broker/work_stream.py",
                "        replies = self._connection.call_each(",
                "        for entry, _ in finished:\n"
                '            self._connection.execute("XACK", self.stream, GROUP, entry.id)\n'
                '            self._connection.execute("XDEL", self.stream, entry.id)\n'
                "        replies = self._connection.call_each(",
            ),
        ),
        dies_at("actor", "handoff.before", 10),
        "lost",
    ),
    "keeps what no role can read": Mutant(
        23,
        "the learner meets an entry without fields at each start, and ends each time",
        (("common/broker/work_stream.py", "malformed[str(error)].append(text(row[0]))", "raise"),),
        scenarios.calm,
        "stuck",
    ),
    "never compares the server with its ledger": Mutant(
        26,
        "tickets that another client deleted are waited for in vain",
        (
            ("learner/streams/ticket_flow.py", "if time.monotonic() < self._check_at:", "if True:"),
            ("learner/streams/ticket_flow.py", " or self._queue.damaged", ""),
        ),
        scenarios.another_client_deletes_the_tickets,
        "stuck",
    ),
    "workers trust the state": Mutant(
        28,
        "the state that another client wrote sends all workers home",
        (
            (
                "common/broker/run_view.py",
                'if self._read("GET", self.keys.state) != b"ended":',
                'if self._read("GET", self.keys.state) == b"ended":\n'
                "            return True\n"
                "        else:",
            ),
        ),
        scenarios.another_client_writes,
        "stuck",
    ),
    "attempts in company bury": Mutant(
        15,
        "a poison prompt kills the engine three times, and all that were in flight are dead",
        (
            (
                "common/broker/functions.lua",
                "local before, doomed = failed_before(found) or 0, runs_alone(pending)",
                "local before = failed_before(found) or 0\n"
                "      local doomed = before + lost_leases(pending) + 1 >= most",
            ),
            (
                "common/broker/work_stream.py",
                "return entry.attempts >= self.max_attempts - 1 and entry.attempts > 0",
                "return False",
            ),
        ),
        scenarios.poison_kills_the_actor,
        "lost",
    ),
    "forgets the versions of its predecessor": Mutant(
        29,
        "what its predecessor's weights sampled is refused, although the run continues from them",
        (
            (
                "learner/state/ledger.py",
                "self.versions = {Version.parse(text): made for text, made in versions}",
                "self.versions = {}",
            ),
        ),
        scenarios.learner_dies_before_slow_actors,
        "lost",
    ),
}


def copy_sources(folder: Path, edits: tuple[Edit, ...]) -> Path:
    """The sources with the edits; raises AssertionError where a text is not there exactly once."""
    for package in _PACKAGES:
        # The compiled files of what is not edited stay valid. A file that Python is writing is left out.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=unfinished)
    for name, old, new in edits:
        path = folder / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} holds {old!r} {text.count(old)} times, expected once"
        path.write_text(text.replace(old, new))
    return folder


def try_mutant(folder: Path, name: str) -> dict:
    """The verdicts on the scenario, with the rule and without."""
    mutant = MUTANTS[name]
    kept = run_scenario(folder, name)
    sources = copy_sources(folder / f"{name}, sources", mutant.edits)
    for _ in range(_TRIES):
        taken_out = _verdict(folder, name, sources)
        if mutant.verdict in taken_out["kinds"]:
            break
    as_expected = not kept["kinds"] and mutant.verdict in taken_out["kinds"]
    return {
        "mutant": name,
        "rule": mutant.rule,
        "as_expected": as_expected,
        "expected": mutant.verdict,
        "with_the_rule": kept,
        "without": taken_out,
    }


def _verdict(folder: Path, name: str, sources: Path) -> dict:
    """In a fork, which imports those sources. The libraries are imported already."""
    found = sources / "verdict.json"
    pid = os.fork()
    if pid == 0:
        signal.alarm(_LIMIT_S)  # whatever hangs
        try:
            mutants = _import_again(sources)
            found.write_text(json.dumps(mutants.run_scenario(folder, name, _STUCK_S)))
        except BaseException:  # whatever it is, a forked process must not return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(found.read_text())


def _import_again(sources: Path) -> Any:
    """This module and all of Penstock, from those sources."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("penstock", "tests")]:
        del sys.modules[name]
    os.chdir(sources)
    sys.path.insert(0, str(sources))
    again = importlib.import_module("tests.crashes.mutants")
    inside = [sys.modules[name].__file__ for name in ("tests.judge", "penstock.common.failpoint")]
    assert all(path and path.startswith(str(sources)) for path in inside), inside
    return again


def run_scenario(folder: Path, name: str, stuck_s: float = math.inf) -> dict:
    """The scenario on the sources that this process imported.

    One that is expected to get stuck is so after `stuck_s`, if that is sooner.
    """
    world = MUTANTS[name].scenario(in_new_folder(folder, name))
    if MUTANTS[name].verdict == "stuck":
        world.limit_s = min(world.limit_s, stuck_s)
    verdict = world.run()
    return {
        "kinds": sorted(verdict.kinds),
        "faults": verdict.faults[:5],
        "seconds": round(verdict.seconds, 1),
    }


def main() -> int:
    """Try the mutants named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="mutants at a time")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as name:
        folder = Path(name)
        prepare_model(folder)
        gc.freeze()  # a collection in a fork would copy all objects of the parent
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for result in pool.imap_unordered(partial(try_mutant, folder), options.names or MUTANTS):
                right &= result["as_expected"]
                print(json.dumps(result), flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
