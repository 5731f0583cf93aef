"""Every place where a process may die: all runs must end as if nobody had died.

    python -m tests.crashes.matrix [--record] [--alone] [ROLE:PLACE ...]

prints a line of JSON per place. In a run the learner dies twice and the others once, each at a place
of its own; the file that a dying role leaves tells whether it died there. A fault counts against every
place of its run. With --alone, and for a place that was missed, a run has one death. --record prints
the places that a calm run passes by, and how often.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.common.failpoint import Armed
from tests.crashes.world import ROLES, World, in_new_folder

_LATEST = 10
"""The latest passage at which a process dies: what is passed by more often is polled."""

_LIMIT_S = 90.0
"""Four deaths cost four leases, one after the other at worst."""

_WORKERS = (
    "GET", "HMGET", "XREADGROUP", "leases", "reclaim", "renew", "handoff", "put_back", "mark_alone",
    "bury", "remove_consumer", "drop", "HINCRBYFLOAT", "TIME", "HSET", "HDEL",
)  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "learner": (
        "GET", "HGET", "HMGET", "TYPE", "FUNCTION", "claim", "own", "beat", "put", "places", "close",
        "set_totals", "issue", "outcomes", "drop", "restore", "TIME", "HSET", "HSCAN",
    ),
    "actor": _WORKERS,
    "rewarder": _WORKERS,
}  # fmt: skip
"""The protocol's commands by the role whose death is tried before and after each."""

_PLACES = (
    "claims.linked", "journal.before", "appended", "journal.synced", "updated", "recorded",
    "versions.model.safetensors", "versions.synced", "versions.renamed",
    "checkpoints.README.md", "checkpoints.model.safetensors", "checkpoints.model", "checkpoints.trainer",
    "checkpoints.state.json", "checkpoints.manifest.json", "checkpoints.synced", "checkpoints.renamed",
    "best.best.json", "best.model.safetensors", "best.model", "best.synced", "best.renamed",
)  # fmt: skip
"""The learner's other places."""


@dataclass
class Recording(Armed):
    """Kills nobody; writes down what is passed by."""

    path: Path = field(default=Path(os.devnull))

    def pass_by(self, name: str) -> None:
        """Append the place."""
        with self.path.open("a") as file:
            file.write(f"{name}\n")


def points() -> list[tuple[str, str]]:
    """All points as (role, place)."""
    sides = ("before", "after")
    commands = [(role, f"{name}.{side}") for role in ROLES for name in COMMANDS[role] for side in sides]
    return commands + [("learner", place) for place in _PLACES]


def record(folder: Path) -> dict[str, Counter[str]]:
    """The places each role passes by in a calm run, and how often; raises AssertionError."""
    recordings = {role: Recording("", path=folder / f"{role}.passed") for role in ROLES}
    verdict = World(
        in_new_folder(folder, "calm"), {role: [one] for role, one in recordings.items()}
    ).run()
    assert not verdict.faults, verdict
    return {role: Counter(found.path.read_text().split()) for role, found in recordings.items()}


Death = tuple[str, str, int]
"""A role, the place where it dies, and at which passage."""


def share_runs(wanted: list[tuple[str, str]], passed: dict[str, Counter[str]]) -> list[list[Death]]:
    """The deaths of each run, half-way through the passages of a place: one per role, the learner's two.

    The learner has twice as many places. It dies first where a run passes by least often, which is
    mostly at its start: then the run that is left is as long as a calm one.
    """
    learners, actors, rewarders = (
        [
            (role, place, max(1, min(passed[role][place] // 2, _LATEST)))
            for at, place in wanted
            if at == role
        ]
        for role in ROLES
    )
    learners.sort(key=lambda death: passed["learner"][death[1]])
    runs = (len(learners) + 1) // 2
    together = itertools.zip_longest(learners[:runs], learners[runs:], actors, rewarders)
    return [[death for death in deaths if death] for deaths in together]


def die_at(folder: Path, deaths: list[Death]) -> list[dict]:
    """A run with these deaths; those whose place was missed have another run of their own."""
    home = in_new_folder(folder, "-".join(f"{role}-{place}" for role, place, _ in deaths))
    armed = {
        (role, place): Armed(place, passage, home / f"{role}-{place}.fired")
        for role, place, passage in deaths
    }
    by_role = {role: [one for (at, _), one in armed.items() if at == role] for role in ROLES}
    for role, place, _ in deaths:
        if place.startswith("reclaim."):  # there is nothing to reclaim before one has died with its work
            by_role[role].insert(0, Armed("handoff.before", 2, home / f"{role}-first.fired"))
    verdict = World(home, by_role, limit_s=_LIMIT_S).run()
    results = []
    for role, place, passage in deaths:
        died = (home / f"{role}-{place}.fired").exists()
        if not died and not verdict.faults and (len(deaths) > 1 or passage > 1):
            results += die_at(folder, [(role, place, passage if len(deaths) > 1 else 1)])
            continue
        results.append(
            {
                "point": f"{role}:{place}",
                "passage": passage,
                "died": died,
                "faults": verdict.faults,
                "deaths": verdict.deaths,
                "seconds": round(verdict.seconds, 1),
            }
        )
    return results


def main() -> int:
    """Try the points given, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="print the places of a calm run")
    parser.add_argument("--alone", action="store_true", help="one death per run")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="runs at a time")
    parser.add_argument("points", nargs="*", metavar="ROLE:PLACE")
    options = parser.parse_args()
    sound = True
    with tempfile.TemporaryDirectory(prefix="penstock-crashes-") as name:
        folder = Path(name)
        passed = record(folder)
        print(json.dumps({"calm": passed}), flush=True)
        wanted = [tuple(point.split(":", 1)) for point in options.points] or points()
        runs = [
            deaths
            for part in ([[point] for point in wanted] if options.alone else [wanted])
            for deaths in share_runs(part, passed)
        ]
        gc.freeze()  # a collection in a fork would copy all objects of the parent
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            found = pool.imap_unordered(partial(die_at, folder), [] if options.record else runs)
            for result in itertools.chain.from_iterable(found):
                sound &= result["died"] and not result["faults"]
                print(json.dumps(result), flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
