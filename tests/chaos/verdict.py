"""What became of a chaos run: the judge's verdict, the streams, the replay, the floors.

The judge reads the journal; the streams are read from the server, started once more after the end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.connection import Connection
from common.keys import Keys
from common.monitor import read_audit
from common.server import LocalServer
from tests.chaos.killer import Kill
from tests.chaos.plan import Floors
from tests.chaos.victims import KINDS, LEARNER, SERVER
from tests.chaos.world import World
from tests.judge import judge, read_records

BLAMED = (
    "lost its lease while running alone",
    "the rewarder was lost while it scored only this",
)
"""The only reasons to die that a kill may give: on its last attempt a ticket runs alone."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A run's figures, and what is wrong with it; `faults` is empty if it is sound."""

    faults: list[str]
    kills: dict[str, list[int]]
    """The steps at which the kills fell, by kind."""
    entries_lost: int
    """Entries that killed servers had acknowledged and lost."""
    updates: int
    groups: int
    states: dict[str, int]
    resumes: int
    left: dict[str, int]
    """What is left on the server at the end, by stream."""
    replayed: dict[str, Any]
    took_s: float

    @property
    def total(self) -> int:
        """Kills of all kinds."""
        return sum(map(len, self.kills.values()))


def reach_verdict(world: World, kills: Sequence[Kill], floors: Floors, took_s: float) -> Verdict:
    """Judge a run that has ended."""
    judged = judge(world.run_folder)
    faults = list(judged["faults"])
    if world.exit_code:
        faults.append(f"the run ended with exit code {world.exit_code}, see roles.log")
    faults += _wrongly_dead(world)
    left, books = _left_behind(world)
    faults += books + [f"{count} entries are left on {name}" for name, count in left.items() if count]
    replayed = world.site.replay() if judged["steps"] else {}
    if replayed.get("weights_difference") != 0.0 or replayed["steps"] != judged["steps"]:
        faults.append(f"the replayed journal gives other weights: {replayed}")
    if replayed.get("steps_with_other_metrics"):
        faults.append(f"the replayed journal gives other metrics: {replayed}")
    by_kind: dict[str, list[int]] = defaultdict(list)
    for kill in kills:
        by_kind[kill.kind].append(kill.step)
    found = Verdict(
        faults=faults,
        kills={kind: by_kind[kind] for kind in KINDS},
        entries_lost=sum(kill.lost or 0 for kill in kills),
        updates=judged["steps"],
        groups=judged["states"].get("trained", 0),
        states=judged["states"],
        resumes=len(judged["resumed_at"]),
        left=left,
        replayed=replayed,
        took_s=round(took_s, 1),
    )
    faults += _missed(found, floors)
    return found


def _wrongly_dead(world: World) -> list[str]:
    dead = {
        ticket: reason
        for _, record in read_records(world.run_folder)
        for ticket, (state, reason) in record["ends"].items()
        if state == "dead"
    }
    return [
        f"{ticket} died of kills alone: {reason}"
        for ticket, reason in dead.items()
        if not reason.startswith(BLAMED)
    ]


def _left_behind(world: World) -> tuple[dict[str, int], list[str]]:
    """Entries per stream, and what the audit says."""
    run = world.site.variables["RUN_NAME"]
    keys = Keys(run)
    with LocalServer(world.run_folder) as server:
        connection = Connection(server.url, 10, 10)
        left = {
            key.rpartition(":")[2]: int(connection.execute("XLEN", key))
            for key in (*keys.work_streams, *keys.outcome_streams)
        }
        audit = read_audit(connection, run)
        connection.close()
    flying = Counter(ticket.stream for ticket in audit.in_flight)
    return left, [*audit.faults, *(f"{count} in flight on {name}" for name, count in flying.items())]


def _missed(found: Verdict, floors: Floors) -> list[str]:
    reached = {
        "kills": (found.total, floors.kills),
        "kills of the server": (len(found.kills[SERVER]), floors.server),
        "kills of the learner": (len(found.kills[LEARNER]), floors.learner),
        "groups trained": (found.groups, floors.groups),
        "Updates": (found.updates, floors.updates),
    }
    return [
        f"{count} {what}, expected at least {floor}"
        for what, (count, floor) in reached.items()
        if count < floor
    ]
