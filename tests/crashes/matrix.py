"""Every place where a process may die, each in a run of its own: all must end as if it had not.

    python -m tests.crashes.matrix [--record] [ROLE:PLACE ...]

prints a line of JSON per run; --record prints the places that a calm run passes by, and how often.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from penstock.common.failpoint import Armed
from tests.crashes.world import ROLES, World, in_new_folder

_LATEST = 10
"""The latest passage at which a process dies: what is passed by more often is polled."""

_WORKERS = (
    "GET", "HMGET", "XREADGROUP", "reclaim", "renew", "handoff", "put_back", "mark_alone", "bury",
    "remove_consumer",
)  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "learner": (
        "HGET", "FUNCTION", "claim", "beat", "put", "audit", "close", "set_totals", "issue", "outcomes",
    ),
    "actor": _WORKERS,
    "rewarder": _WORKERS,
}  # fmt: skip
"""The protocol's commands by the role whose death is tried before and after each."""

_PLACES = (
    "claims.linked", "journal.before", "appended", "journal.synced", "updated", "recorded",
    "versions.model.safetensors", "versions.synced", "versions.renamed",
    "checkpoints.model.safetensors", "checkpoints.state.json", "checkpoints.manifest.json",
    "checkpoints.synced", "checkpoints.renamed",
    "best.best.json", "best.model.safetensors", "best.synced", "best.renamed",
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
    verdict = World(in_new_folder(folder, "calm"), recordings).run()
    assert not verdict.faults, verdict
    return {role: Counter(found.path.read_text().split()) for role, found in recordings.items()}


def die_at(folder: Path, role: str, place: str, passages: int) -> dict:
    """A run in which a role dies once at a place that a calm run passes by so often."""
    home = in_new_folder(folder, f"{role}-{place}")
    for passage in sorted({max(1, min(passages // 2, _LATEST)), 1}, reverse=True):
        home = in_new_folder(folder, f"{role}-{place}")
        armed = Armed(place, passage, home / "fired")
        verdict = World(home, {role: armed}).run()
        died = (home / "fired").exists()
        if died or verdict.faults:
            break
    return {
        "point": f"{role}:{place}",
        "passage": passage,
        "died": died,
        "faults": verdict.faults,
        "deaths": verdict.deaths,
        "seconds": round(verdict.seconds, 1),
    }


def _die_at(task: tuple[Path, str, str, int]) -> dict:
    return die_at(*task)


def main() -> int:
    """Try the points given, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="print the places of a calm run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("points", nargs="*", metavar="ROLE:PLACE")
    options = parser.parse_args()
    sound = True
    with tempfile.TemporaryDirectory(prefix="penstock-crashes-") as name:
        folder = Path(name)
        passed = record(folder)
        print(json.dumps({"calm": passed}), flush=True)
        wanted = [tuple(point.split(":", 1)) for point in options.points] or points()
        tasks = [(folder, role, place, passed[role][place]) for role, place in wanted]
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for result in pool.imap_unordered(_die_at, [] if options.record else tasks):
                sound &= result["died"] and not result["faults"]
                print(json.dumps(result), flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
