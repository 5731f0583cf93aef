"""What became of a chaos run: the judge's verdict, the streams, the replay, the floors.

The judge reads the journal; the streams are read from the server, started once more after the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.monitor.snapshot import read_audit
from tests.chaos.killer import Kill
from tests.chaos.plan import Floors
from tests.chaos.victims import KINDS, LEARNER, SERVER
from tests.chaos.world import World
from tests.judge import judge, read_records

BLAMED = ("lost its lease while running alone", "the rewarder was lost while it scored only this")
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
    faults += wrongly_dead(world.run_folder)
    left, books = left_behind(world.run_folder, world.site.variables["RUN_NAME"])
    faults += books
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
    faults += missed(found, floors)
    return found


def wrongly_dead(run_folder: Path) -> list[str]:
    """Tickets that died although only kills befell them, and none while they ran alone."""
    dead = {
        ticket: reason
        for _, record in read_records(run_folder)
        for ticket, (state, reason) in record["ends"].items()
        if state == "dead"
    }
    return [
        f"{ticket} died of kills alone: {reason}"
        for ticket, reason in dead.items()
        if not reason.startswith(BLAMED)
    ]


def left_behind(run_folder: Path, run: str) -> tuple[dict[str, int], list[str]]:
    """Entries per stream of a run that has ended, and what is wrong with that or with its audit."""
    keys = Keys(run)
    with LocalServer(run_folder) as server:
        connection = Connection(server.url, 10, 10)
        left = {
            key.rpartition(":")[2]: int(connection.execute("XLEN", key))
            for key in (*keys.work_streams, *keys.outcome_streams)
        }
        audit = read_audit(connection, run)
        connection.close()
    faults = [f"{count} entries are left on {name}" for name, count in left.items() if count]
    faults += [f"{ticket.ticket} is still in flight on {ticket.stream}" for ticket in audit.in_flight]
    return left, [*faults, *audit.faults]


def missed(found: Verdict, floors: Floors) -> list[str]:
    """The floors that a run did not reach."""
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
