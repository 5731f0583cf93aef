"""Actors that join and leave at random: the run goes on at the speed of those that are awake.

    python -m tests.joiners [--seconds S] [--actors N] [--seed N] [--lease-s S] [--http] [--json]
    python -m tests.joiners --still [--lease-s S]

runs learner, rewarder and queue server under `penstock up`, and N actors with fake engines beside
them: kill -9, SIGTERM, SIGSTOP and SIGCONT, and new ones. Work counts in engine seconds: what the fake
engine needs for the groups that were trained. Exit code 1 if less than 97% of a calm stretch's work
per awake second was done, if there was no step for 10 s, or if the judge finds a fault.

With --still: how long a run of two actors stands still when one that holds tickets is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.local_server import started_server
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.common.wire.codec import decode
from penstock.common.wire.messages import ScoredGroup
from tests.e2e.forked import Forked, ForkedSite
from tests.e2e.site import FAKE_PROCFILE, ROOT
from tests.judge import judge, read_records

SHARE = 0.97
LONGEST_GAP_S = 10.0
TOKEN_S = 0.4
GENERATIONS = 2
GROUPS_PER_STEP = 12
STALENESS = 15
_PROCFILE = "learner: learner\nrewarder: rewarder\n"
_LOOK_S = 0.1
_DEFAULTS = {
    "LEARNER_MAX_STALENESS": "1",
    "LEARNER_GROUPS_PER_STEP": "4",
    "ACTOR_MAX_NUM_SEQS": "8",
    "FAKE_TOKEN_DELAY_S": "0.1",
}
"""With --still: the staleness that a run has without settings, and actors with room for four groups."""

_LAST_STEPS = 2
"""Steps that a calm run makes at the end, so that its journal is whole for the judge."""


def variables(lease_s: float) -> dict[str, str]:
    """The settings of a run whose limit is the actors: one group at a time each, of slow tokens."""
    return {
        "RUN_LEASE_S": str(lease_s),
        "RUN_MAX_ATTEMPTS": "20",
        "LEARNER_NUM_GENERATIONS": str(GENERATIONS),
        "LEARNER_GROUPS_PER_STEP": str(GROUPS_PER_STEP),
        "LEARNER_MAX_STALENESS": str(STALENESS),
        "LEARNER_MAX_STEPS": "1000000",
        "LEARNER_EVAL_DATASET": "",
        "LEARNER_JOURNAL_SEGMENT_MIB": "1",
        "ACTOR_MAX_NUM_SEQS": str(GENERATIONS),
        "FAKE_TOKEN_DELAY_S": str(TOKEN_S),
        "OMP_NUM_THREADS": "1",
    }


@dataclass
class Actor:
    """An actor's process, and from when to when it was awake; `since` None: it is not."""

    process: Forked
    since: float | None = None
    awake: list[tuple[float, float]] = field(default_factory=list)
    joined: bool = False

    def rouse(self) -> None:
        """It is awake from now on."""
        self.since = time.monotonic()

    def rest(self) -> None:
        """It is awake no more."""
        if self.since is not None:
            self.awake.append((self.since, time.monotonic()))
        self.since = None

    def awake_s(self, start: float, end: float) -> float:
        """Its awake seconds between two times."""
        spans = [*self.awake, *([(self.since, end)] if self.since is not None else [])]
        return sum(max(0.0, min(until, end) - max(since, start)) for since, until in spans)


class Crowd:
    """The actors of a run, all that ever lived."""

    def __init__(self, site: ForkedSite) -> None:
        self.site = site
        self.actors: list[Actor] = []
        self.events: Counter[str] = Counter()
        self._log = (site.folder / "actors.log").open("w")
        self._connection = Connection(started_server(RunFolder(site.run_folder)), 10, 30)
        self._tickets = Keys(site.variables["RUN_NAME"]).tickets

    def add(self) -> None:
        """Start an actor."""
        cache = self.site.folder / "caches" / str(len(self.actors))
        environment = os.environ | self.site.variables | {"RUN_CACHE_DIR": str(cache)}
        process = Forked("tests.actors.fake_actor", [], ROOT, environment)
        threading.Thread(target=self._copy, args=(process,), daemon=True).start()
        self.actors.append(Actor(process))
        self.events["joined"] += 1

    def _copy(self, process: Forked) -> None:
        for line in process.stdout:
            self._log.write(f"{time.time():.2f} {process.pid} | {line}")
            self._log.flush()

    @property
    def awake(self) -> list[Actor]:
        """Those that work; one that was told to end counts no more."""
        return [actor for actor in self.actors if actor.since is not None]

    def look(self) -> None:
        """An actor is awake from its first ticket on, until it is disturbed, or ends by itself."""
        new = [actor for actor in self.actors if not actor.joined]
        for actor in [*self.awake, *new]:
            if actor.process.poll() is not None:
                actor.rest()
                actor.joined = True
                self.events["failed"] += 1
        if not new:
            return
        for found in self._connection.execute("XINFO CONSUMERS", self._tickets, GROUP):
            for actor in new:
                if f"-{actor.process.pid}-" in found["name"].decode() and found["pending"]:
                    actor.joined = True
                    actor.rouse()

    def disturb(self, actor: Actor, how: str) -> None:
        """kill, end or stop an awake actor, or continue one."""
        self.events[how] += 1
        numbers = {"kill": signal.SIGKILL, "end": signal.SIGTERM,
                   "stop": signal.SIGSTOP, "continue": signal.SIGCONT}  # fmt: skip
        actor.rest()
        with contextlib.suppress(ProcessLookupError):  # it has failed by itself
            actor.process.send_signal(numbers[how])
        if how == "continue":
            actor.rouse()

    def holders(self) -> dict[int, int]:
        """How many tickets each of the actors holds, by process id."""
        found = self._connection.execute("XINFO CONSUMERS", self._tickets, GROUP)
        return {
            actor.process.pid: int(one["pending"])
            for actor in self.actors
            for one in found
            if f"-{actor.process.pid}-" in one["name"].decode()
        }

    def consumers(self) -> int:
        """Names on the stream of tickets, of the living and of the dead."""
        return len(self._connection.execute("XINFO CONSUMERS", self._tickets, GROUP))

    def end(self) -> None:
        """End all, and wait for it. A second call finds nothing left to do."""
        self._connection.close()
        for actor in self.actors:
            actor.rest()
            with contextlib.suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGCONT) if actor.process.poll() is None else ():
                    actor.process.send_signal(number)
        for actor in self.actors:
            actor.process.wait(120)


class Clock:
    """A thread that notes when each step was recorded."""

    def __init__(self, run_folder: Path) -> None:
        self.times: list[float] = []
        self._path = run_folder / "metrics.jsonl"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        at, count = 0, 0
        while not self._ended.wait(_LOOK_S / 2):
            if self._path.is_file() and self._path.stat().st_size > at:
                with self._path.open("rb") as file:
                    file.seek(at)
                    data = file.read()
                at, count = at + len(data), count + data.count(b"\n")
                self.times += [time.monotonic()] * (count - len(self.times))

    @property
    def steps(self) -> int:
        """Steps until now."""
        return len(self.times)

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run, from one step to another."""

    steps: int
    groups: int
    seconds: float
    awake_s: float
    """Seconds of all actors, while they were awake."""
    engine_s: float
    """What the fake engine needs for the groups that were trained."""
    longest_gap_s: float

    @property
    def utilisation(self) -> float:
        """Engine seconds that were trained per awake second: 1.0 is the fake engine's speed."""
        return self.engine_s / max(self.awake_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Joiners:
    """A run's figures. `faults` says what was lost or done twice, `missed` which bound was not kept."""

    calm: Stretch
    busy: Stretch
    share: float
    """Of the calm stretch's work per awake second."""
    events: dict[str, int]
    consumers: int
    """Names on the stream of tickets at the end."""
    states: dict[str, int]
    faults: list[str]
    missed: list[str]


def run_joiners(
    folder: Path, seconds: float, actors: int, seed: int, lease_s: float, *, pause_s: float = 3.0,
    warm_s: float = 30.0, calm_s: float = 30.0, steps: int = 1, **settings: str,
) -> Joiners:  # fmt: skip
    """Run a calm stretch, then one in which an actor is disturbed every `pause_s`, and judge the run.

    They last `calm_s` and `seconds`, or longer if there are fewer than `steps` steps. The starts of many
    processes slow down the steps of `warm_s` before, which do not count.
    """
    site = ForkedSite(folder, _PROCFILE, **variables(lease_s) | settings)
    with ExitStack() as stack:
        clock, crowd = begin(site, actors, stack)
        pass_time(site, crowd, clock, warm_s, 0)
        edges = [clock.steps]
        pass_time(site, crowd, clock, calm_s, steps)
        edges.append(clock.steps)
        disturb(site, crowd, clock, random.Random(seed), seconds, pause_s, steps)
        edges.append(clock.steps)
        consumers = crowd.consumers()
        crowd.end()
        clock.stop()
        finish(site, lease_s)
    work = engine_seconds(site.run_folder)
    calm, busy = (measure(crowd.actors, clock.times, work, *edge) for edge in pairwise(edges))
    return conclude(calm, busy, dict(crowd.events), consumers, judge(site.run_folder))


def begin(site: ForkedSite, actors: int, stack: ExitStack) -> tuple[Clock, Crowd]:
    """Start the run and the actors, and wait until all work at the staleness of a long run.

    `stack` ends them.
    """
    stack.callback(site.stop)
    site.start()
    site.wait_for((site.run_folder / "versions").is_dir, "the first weights")
    clock, crowd = Clock(site.run_folder), Crowd(site)
    stack.callback(crowd.end)
    for _ in range(actors):
        crowd.add()

    def all_work() -> bool:
        crowd.look()
        return len(crowd.awake) == actors and clock.steps > int(site.variables["LEARNER_MAX_STALENESS"])

    site.wait_for(all_work, "all actors, and the first tickets to be due")
    return clock, crowd


def pass_time(site: ForkedSite, crowd: Crowd, clock: Clock, seconds: float, steps: int) -> None:
    """Wait for so many seconds and steps, then for the next step."""
    until, least = time.monotonic() + seconds, clock.steps + steps

    def passed() -> bool:
        crowd.look()
        return time.monotonic() >= until and clock.steps >= least

    site.wait_for(passed, f"{steps} steps", 600 + seconds)
    last = clock.steps
    site.wait_for(lambda: clock.steps > last, "the next step")


def disturb(
    site: ForkedSite, crowd: Crowd, clock: Clock, chance: random.Random, seconds: float, pause_s: float,
    steps: int,
) -> None:  # fmt: skip
    """Kill, end and stop actors; continue the stopped ones, and start one for each that has ended."""
    until, least = time.monotonic() + seconds, clock.steps + steps
    next_at = time.monotonic()
    later: list[tuple[float, Actor | None]] = []
    while time.monotonic() < until or clock.steps < least or not crowd.events["continue"]:
        now = time.monotonic()
        crowd.look()
        for due in [due for due in later if due[0] <= now]:
            later.remove(due)
            if due[1] is None:
                crowd.add()
            else:
                crowd.disturb(due[1], "continue")
        if now >= next_at and len(crowd.awake) > 1:
            next_at = now + chance.expovariate(1 / pause_s)
            actor, how = chance.choice(crowd.awake), chance.choice(["kill", "end", "stop"])
            crowd.disturb(actor, how)
            away_s = chance.uniform(0.5, 4 * pause_s)
            later.append((now + away_s, actor if how == "stop" else None))
        site.wait_for(lambda: True, "nothing")  # fails when the run has ended
        time.sleep(_LOOK_S)
    for _, actor in later:
        if actor is not None:
            crowd.disturb(actor, "continue")
    # What waits behind the last tickets of killed actors was done in this stretch.
    pass_time(site, crowd, clock, 3 * float(site.variables["RUN_LEASE_S"]), 1)


def finish(site: ForkedSite, lease_s: float) -> None:
    """Go on with two actors for a few steps, and end in order."""
    site.stop()
    assert site.wait(60) == 0, "\n".join(site.lines[-40:])
    (site.folder / "Procfile").write_text(FAKE_PROCFILE)
    more = {"LEARNER_MAX_STEPS": str(site.steps() + _LAST_STEPS), "FAKE_TOKEN_DELAY_S": "0",
            "ACTOR_MAX_NUM_SEQS": "64"}  # fmt: skip
    site.variables |= more
    site.start("--actors", "2")
    assert site.wait(600 + 10 * lease_s) == 0, "\n".join(site.lines[-40:])


def engine_seconds(run_folder: Path) -> list[tuple[int, float]]:
    """Of each step's batch: its groups, and for how long an engine samples them one by one."""
    found = []
    for _, record in read_records(run_folder):
        if record["kind"] == "batch":
            groups = [decode(data, ScoredGroup).group for data in record["groups"]]
            tokens = (max(len(one.token_ids) for one in group.rollouts) for group in groups)
            found.append((len(groups), TOKEN_S * sum(tokens)))
    return found


def measure(
    actors: Iterable[Actor], times: Sequence[float], work: Sequence[tuple[int, float]],
    first: int, last: int,
) -> Stretch:  # fmt: skip
    """The stretch after step `first`, up to step `last`; all actors have ended."""
    start, end = times[first - 1], times[last - 1]
    groups, seconds = zip(*work[first:last], strict=True)
    return Stretch(
        steps=last - first,
        groups=sum(groups),
        seconds=round(end - start, 2),
        awake_s=round(sum(actor.awake_s(start, end) for actor in actors), 2),
        engine_s=round(sum(seconds), 2),
        longest_gap_s=round(max(b - a for a, b in pairwise(times[first - 1 : last])), 2),
    )


def conclude(
    calm: Stretch, busy: Stretch, events: dict[str, int], consumers: int, judged: dict[str, Any]
) -> Joiners:
    """What is wrong with a run that has ended."""
    share = busy.utilisation / calm.utilisation
    faults = list(judged["faults"])
    if failed := events.get("failed"):
        faults.append(f"{failed} actors ended by themselves, see actors.log")
    if odd := judged["states"].keys() - {"trained", "unused"}:
        faults.append(f"tickets ended as {', '.join(sorted(odd))}: {judged['states']}")
    missed = []
    if share < SHARE:
        missed.append(f"{share:.1%} of the calm work per awake second, expected at least {SHARE:.0%}")
    if busy.longest_gap_s > LONGEST_GAP_S:
        missed.append(f"no step for {busy.longest_gap_s:g} s, expected at most {LONGEST_GAP_S:g} s")
    return Joiners(calm, busy, round(share, 4), events, consumers, judged["states"], faults, missed)


def stand_still(folder: Path, lease_s: float) -> dict[str, float]:
    """Stop one of two actors that holds tickets; return for how long there was no step."""
    site = ForkedSite(folder, _PROCFILE, **variables(lease_s) | _DEFAULTS)
    with ExitStack() as stack:
        clock, crowd = begin(site, 2, stack)
        pass_time(site, crowd, clock, 0.0, 5)
        before = [b - a for a, b in pairwise(clock.times[-6:])]
        victim = crowd.awake[0]
        site.wait_for(lambda: crowd.holders().get(victim.process.pid, 0) > 0, "a held ticket")
        crowd.disturb(victim, "stop")
        at, began = time.monotonic(), clock.steps
        pass_time(site, crowd, clock, 3 * lease_s + 10.0, 5)
        times = [at, *clock.times[began:]]
        crowd.end()
        clock.stop()
        gaps = [b - a for a, b in pairwise(times)]
        return {
            "lease_s": lease_s,
            "calm_step_s": round(max(before), 2),
            "stood_still_s": round(max(gaps), 2),
            "from_s": round(times[gaps.index(max(gaps))] - at, 2),
        }


def format_joiners(found: Joiners) -> str:
    """The table for people."""
    lines = [f"{'':<34}{'calm':>10}{'disturbed':>12}"]
    rows: list[tuple[str, Callable[[Stretch], str]]] = [
        ("seconds", lambda one: f"{one.seconds:.1f}"),
        ("steps", lambda one: str(one.steps)),
        ("groups trained", lambda one: str(one.groups)),
        ("awake actors", lambda one: f"{one.awake_s / one.seconds:.1f}"),
        ("of the fake engines' speed", lambda one: f"{one.utilisation:.1%}"),
        ("longest time without a step, in s", lambda one: f"{one.longest_gap_s:.1f}"),
    ]
    lines += [f"{name:<34}{of(found.calm):>10}{of(found.busy):>12}" for name, of in rows]
    lines += [
        "",
        f"of the calm work per awake second {found.share:>10.1%}",
        "events            " + ", ".join(f"{count} {how}" for how, count in found.events.items()),
        f"consumers         {found.consumers} on the stream of tickets",
        "tickets           " + ", ".join(f"{count} {state}" for state, count in found.states.items()),
        *(f"FAULT: {fault}" for fault in found.faults),
        *(f"MISSED: {bound}" for bound in found.missed),
        f"verdict: {len(found.faults)} faults, {len(found.missed)} bounds missed",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run it in a new folder, or the one given."""
    parser = argparse.ArgumentParser(
        prog="tests.joiners", description="Actors join and leave at random."
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of the disturbed stretch")
    parser.add_argument("--actors", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="decides who is disturbed, and how")
    parser.add_argument("--lease-s", type=float, default=3.0, help="RUN_LEASE_S")
    parser.add_argument("--http", action="store_true", help="each actor fetches weights by HTTP")
    parser.add_argument("--still", action="store_true", help="measure one stopped actor of two")
    parser.add_argument("--json", action="store_true", help="print one object of JSON")
    parser.add_argument("--folder", type=Path, help="empty folder to use (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-joiners-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder {folder} is not empty: a run in it would go on; give a new one")
    print(f"the run's folder is in {folder}", file=sys.stderr, flush=True)
    guard_children()
    if options.still:
        print(json.dumps(stand_still(folder, options.lease_s)))
        return 0
    by_http = {"ACTOR_WEIGHTS_FROM": "http", "LEARNER_FILES_ADDRESS": "127.0.0.1:0"}
    found = run_joiners(
        folder, options.seconds, options.actors, options.seed, options.lease_s,
        **(by_http if options.http else {}),
    )  # fmt: skip
    print(json.dumps(asdict(found), indent=1) if options.json else format_joiners(found))
    return 1 if found.faults or found.missed else 0


if __name__ == "__main__":
    sys.exit(main())
