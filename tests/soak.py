"""A long calm run, in which nothing may grow.

    python -m tests.soak [--seconds S] [--groups N] [--json] [--folder F]

runs `penstock up` with fake engines and tiny groups. Every few seconds each process is looked at
(memory, file descriptors, threads) and the queue server (keys, memory, consumers, lengths of streams).
Prints the medians of the first and the last third after a warm-up, and each role's processor time per
step in the first and the last half. What runs beside, and processors whose speed changes, move that of
all roles by up to 20% within a run; the learner's, compared with that of actors and rewarders at the
same time, moved by at most 1.1% in seven runs. Exit code 1 if something grew by more than its bound
(`has_grown`), if that ratio changed by more than 5%, or if fewer than N groups were trained.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.local_server import started_server
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from tests.chaos.victims import helper_kind
from tests.e2e.site import FAKE_PROCFILE, Site

GROUPS_PER_STEP = 4
CREDIT = 2 * GROUPS_PER_STEP
WARM_UP = 0.25
"""Of a run, before the first third: pools of threads and caches fill."""

MEMORY_MIB, MEMORY_SHARE = 5.0, 0.05
POOLED: dict[str | tuple[str, str], int] = {
    "descriptors": 2, "threads": 2, "clients": 10, ("queue.1", "descriptors"): 10,
}  # fmt: skip
"""By how many each may grow; of the server for its five roles' processes together."""

CPU_SHARE = 0.05
_MIB = 2**20
_STARTED = re.compile(r"^(\S+)\s*\| -- Started as process (\d+)")

Sample = dict[str, dict[str, float]]
"""By process, stream or server, what was measured of it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measure of a process, stream or the server: the medians of the first and the last third."""

    of: str
    measure: str
    first: float
    last: float
    grew: bool


@dataclass(frozen=True, slots=True)
class Soak:
    """What a run's samples say. `grew` names what grew over its bound, `faults` what else is wrong."""

    seconds: float
    steps: int
    groups: int
    samples: int
    rows: list[Row]
    cpu: dict[str, tuple[float, float]]
    """By role, mean processor seconds per step: of the first half after the warm-up and of the last."""
    grew: list[str]
    faults: list[str]


def variables() -> dict[str, str]:
    """The settings of a run whose steps are tiny and many."""
    return {
        "LEARNER_NUM_GENERATIONS": "2",
        "LEARNER_GROUPS_PER_STEP": str(GROUPS_PER_STEP),
        "LEARNER_MAX_STEPS": "1000000",
        "LEARNER_EVAL_STEPS": "200",
        "LEARNER_JOURNAL_SEGMENT_MIB": "1",
        "RUN_LEASE_S": "10",
        "FAKE_TOKEN_DELAY_S": "0.002",
        "OMP_NUM_THREADS": "1",
    }


def run_soak(site: Site, seconds: float, every_s: float, groups: int = 0) -> Soak:
    """Run for `seconds` after the first step, and compare what was seen every `every_s`.

    The run goes on until there are some steps after the warm-up.
    """
    site.start("--actors", "2", "--rewarders", "2")
    try:
        site.wait_for(lambda: _count_steps(site) > 0, "the first step")
        began, at = time.monotonic(), 0.0
        connection = Connection(started_server(RunFolder(site.run_folder)), 10, 30)
        samples: list[Sample] = []
        steps_at: list[int] = []
        while at < seconds or steps_at[-1] < steps_at[int(WARM_UP * len(steps_at))] + GROUPS_PER_STEP:
            due = began + at + every_s
            site.wait_for(lambda due=due: time.monotonic() >= due, "the next sample")  # type: ignore[misc]
            samples.append(take_sample(site, connection))
            with (site.folder / "samples.jsonl").open("a") as file:
                file.write(json.dumps(samples[-1]) + "\n")
            steps_at.append(_count_steps(site))
            at = time.monotonic() - began
        connection.close()
    finally:
        site.stop()
    faults = [] if site.wait(60) == 0 else [f"the run ended with exit code {site.wait(1)}"]
    starts = Counter(match.group(1) for line in site.lines if (match := _STARTED.match(line)))
    faults += [f"{child} was started {count} times" for child, count in starts.items() if count > 1]
    trained = steps_at[-1] * GROUPS_PER_STEP
    if trained < groups:
        faults.append(f"{trained} groups were trained, expected at least {groups}")
    rows = compare(samples)
    calm = int(WARM_UP * len(steps_at))
    cpu = cpu_per_step(read_metrics(site.run_folder)[steps_at[calm] :])
    grew = [f"{row.of}: {row.measure} from {row.first:g} to {row.last:g}" for row in rows if row.grew]
    if said := describe_cpu_growth(cpu):
        grew.append(said)
    return Soak(round(at, 1), steps_at[-1], trained, len(samples), rows, cpu, grew, faults)


def _count_steps(site: Site) -> int:
    path = site.run_folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def take_sample(site: Site, connection: Connection) -> Sample:
    """Look at every process of the run and at the server."""
    found: Sample = {}
    for name, process in _processes(site):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            seen = {
                "processes": 1.0,
                "memory": process.memory_info().rss / _MIB,
                "descriptors": float(process.num_fds()),
                "threads": float(process.num_threads()),
            }
            known = found.setdefault(name, dict.fromkeys(seen, 0.0))
            for measure, value in seen.items():
                known[measure] += value
    return found | _server(connection, Keys(site.variables["RUN_NAME"]))


def _processes(site: Site) -> Iterator[tuple[str, psutil.Process]]:
    """All processes with names; helpers of a kind have one name for each role's process."""
    assert site.process is not None
    up = psutil.Process(site.process.pid)
    yield "penstock up", up
    roles = {int(match.group(2)): match.group(1) for line in list(site.lines)
             if (match := _STARTED.match(line))}  # fmt: skip
    for process in up.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid in roles:
                yield roles[process.pid], process
                continue
            above = [parent.pid for parent in process.parents()]
            role = next((pid for pid in above if pid in roles), up.pid)
            kind = helper_kind(process, role) or "helper"
            yield f"{roles.get(role, 'penstock up')} {kind}", process


def _server(connection: Connection, keys: Keys) -> Sample:
    info = connection.execute("INFO")
    server = {
        "memory": info["used_memory"] / _MIB,
        "keys": float(connection.execute("DBSIZE")),
        "clients": float(info["connected_clients"]),
        "fields": float(
            sum(connection.execute("HLEN", key) for key in (keys.ledger, keys.processes, keys.costs))
        ),
    }
    found: Sample = {"server": server}
    for key in (*keys.work_streams, *keys.outcome_streams, keys.dead):
        found[name := "stream " + key.rpartition(":")[2]] = {
            "length": float(connection.execute("XLEN", key))
        }
        if key in keys.work_streams:
            consumers = connection.execute("XINFO CONSUMERS", key, GROUP)
            found[name]["consumers"] = float(len(consumers))
    return found


def compare(samples: Sequence[Sample]) -> list[Row]:
    """The medians of the first and the last third after the warm-up. What was not there counts as 0."""
    calm = samples[int(WARM_UP * len(samples)) :]
    third = max(1, len(calm) // 3)
    subjects = {(of, measure): None for one in calm for of, seen in one.items() for measure in seen}
    rows = []
    for of, measure in subjects:
        first, last = (
            [one.get(of, {}).get(measure, 0.0) for one in part] for part in (calm[:third], calm[-third:])
        )
        grew = has_grown(of, measure, first, last)
        rows.append(Row(of, measure, round(median(first), 2), round(median(last), 2), grew))
    return rows


def has_grown(of: str, measure: str, first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether a measure grew by more than its bound, from the first third of a run to the last.

    Memory: 5% and 5 MiB. The length of a stream: the credit. Descriptors and threads of a process: two,
    as its pools get one more when more calls than ever coincide; connections of the server: two of each
    role. Keys, consumers and all else: not at all. What lives for a moment only does not count: the
    lowest values have to grow as well.
    """
    more = median(last) - median(first)
    if measure == "memory":
        return more > MEMORY_MIB and more > MEMORY_SHARE * median(first)
    if measure == "length":
        return more > CREDIT
    bound = POOLED.get((of, measure), POOLED.get(measure, 0))
    return more > bound and min(last) > min(first)


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """All steps, in order."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cpu_per_step(steps: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """By role, mean processor seconds per step: of the first half of the steps and of the last.

    The learner's are without its wait for groups.
    """
    half = len(steps) // 2
    parts = steps[:half], steps[half:]
    return {
        role: tuple(fmean(_cpu(step, role) for step in part) for part in parts)  # type: ignore[misc]
        for role in ("learner", "actor", "rewarder")
    }


def describe_cpu_growth(cpu: Mapping[str, tuple[float, float]]) -> str:
    """What to say if the learner's time grew against the others', or theirs; "" if neither did."""
    workers = [sum(both) for both in zip(cpu["actor"], cpu["rewarder"], strict=True)]
    if not all(workers):
        return "no processor time of actors and rewarders was reported"
    first, last = (own / others for own, others in zip(cpu["learner"], workers, strict=True))
    if abs(last / first - 1) <= CPU_SHARE:
        return ""
    whose = "learner" if last > first else "actors and rewarders"
    return f"the processor time of the {whose}: the learner's from {first:.3f} to {last:.3f} of theirs"


def _cpu(step: Mapping[str, Any], role: str) -> float:
    return sum(
        value
        for name, value in step.items()
        if name.startswith(f"perf/{role}/") and name.endswith("_cpu_s") and "/waiting_" not in name
    )


def format_soak(soak: Soak) -> str:
    """The table for people."""
    by_subject: dict[str, list[str]] = {}
    for row in soak.rows:
        change = f"{row.first:g}" + ("" if row.first == row.last else f" -> {row.last:g}")
        mark = " GREW" if row.grew else ""
        by_subject.setdefault(row.of, []).append(f"{row.measure} {change}{mark}")
    lines = ["medians of the first third after the warm-up -> of the last third; memory in MiB", ""]
    lines += [f"{of:<28}{', '.join(measures)}" for of, measures in by_subject.items()]
    lines += ["", "mean processor time per step, in ms: first half after the warm-up, last half"]
    lines += [
        f"{role:<30}{1e3 * first:>24.3f}{1e3 * last:>12.3f}" for role, (first, last) in soak.cpu.items()
    ]
    lines += ["", f"{soak.groups} groups in {soak.steps} steps and {soak.seconds:g} s, "
              f"{soak.samples} samples"]  # fmt: skip
    lines += [f"GREW: {what}" for what in soak.grew] + [f"FAULT: {fault}" for fault in soak.faults]
    return "\n".join([*lines, f"verdict: {len(soak.grew)} grew, {len(soak.faults)} faults"])


def main() -> int:
    """Run it in a new folder, or the one given."""
    parser = argparse.ArgumentParser(prog="tests.soak", description="A long run in which nothing grows.")
    parser.add_argument("--seconds", type=float, default=1200.0, help="length of the run")
    parser.add_argument(
        "--groups", type=int, default=10_000, help="groups that are to be trained at least"
    )
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between two samples")
    parser.add_argument("--json", action="store_true", help="print one object of JSON")
    parser.add_argument("--folder", type=Path, help="empty folder to use (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder {folder} is not empty: a run in it would go on; give a new one")
    print(f"the run's folder is in {folder}", file=sys.stderr, flush=True)
    guard_children()  # a killed trial leaves no run behind
    site = Site(folder, FAKE_PROCFILE, **variables())
    soak = run_soak(site, options.seconds, options.every_s, options.groups)
    print(json.dumps(asdict(soak), indent=1) if options.json else format_soak(soak))
    return 1 if soak.grew or soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
