"""Faults of network, server, disk and processes, one after the other in one run.

    python -m tests.faults [--seed N] [--seconds S] [--kinds "black hole,BUSY"] [--whole] [--together]

runs learner, two actors with a fake engine and two rewarders, each role with a faulty network to the
queue server. Prints a JSON line per fault, then a table of the seconds until work flows again, and
the judge's verdict; exit code 1 if anything is wrong, or if work took more than 5 s and a lease to flow
again. Connections that vanish need 10 s, the timeout of sockets, so the lease is to be over 6 s then.
Without a C compiler there are no faulty clocks and disks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.faults.kinds import KINDS
from tests.faults.trial import GOAL_S, Met, Plan, Verdict, run_faults


def slow(verdict: Verdict) -> list[Met]:
    """The faults after which work did not flow again in time."""
    return [
        met for met in verdict.met
        if met.flows_again_s is None or met.flows_again_s > GOAL_S + met.lease_s
    ]  # fmt: skip


def format_verdict(verdict: Verdict) -> str:
    """The table for people."""
    times: dict[str, list[float]] = defaultdict(list)
    for met in verdict.met:
        times[met.kind].append(float("inf") if met.flows_again_s is None else met.flows_again_s)
    states = ", ".join(f"{count} {state}" for state, count in sorted(verdict.states.items()))
    return "\n".join([
        f"{'fault':<20}{'times':>6}{'median s':>10}{'worst s':>10}  until work flows again",
        *(
            f"{kind:<20}{len(found):>6}{statistics.median(found):>10.1f}{max(found):>10.1f}"
            for kind, found in sorted(times.items())
        ),
        f"{f'all {len(times)} kinds':<20}{len(verdict.met):>6}",
        "",
        f"over {GOAL_S:g} s and a lease: {len(slow(verdict))}",
        f"steps {verdict.steps}; tickets: {states}",
        *(f"FAULT: {fault}" for fault in verdict.faults),
        f"verdict: {len(verdict.faults)} faults" if verdict.faults else "verdict: 0 lost, 0 twice",
    ])  # fmt: skip


def main() -> int:
    """Run it in a new folder, or the one given."""
    parser = argparse.ArgumentParser(prog="tests.faults", description="Meet faults of many kinds.")
    parser.add_argument("--seed", type=int, default=1, help="decides the order, and who is hit")
    parser.add_argument("--seconds", type=float, default=1200.0, help="for how long faults begin")
    parser.add_argument("--count", type=int, default=Plan().count, help="end after so many faults")
    parser.add_argument("--kinds", default="", help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--lease-s", type=float, default=15.0, help="RUN_LEASE_S (default: a run's)")
    parser.add_argument(
        "--whole", action="store_true", help="also 90 and 100 s, each length of each kind"
    )
    parser.add_argument("--together", action="store_true", help="two faults at a time")
    parser.add_argument("--length-s", type=float, default=0.0, help="let each last as long")
    parser.add_argument("--folder", type=Path, help="empty folder to use (default: a new one)")
    options = parser.parse_args()
    kinds = [kind.strip() for kind in options.kinds.split(",") if kind.strip()]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: unknown: {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder {folder} is not empty: give a new one")
    print(f"the processes' lines (roles.log) are in {folder}", file=sys.stderr, flush=True)
    plan = Plan(
        kinds, options.seconds, options.count, whole=options.whole, together=options.together,
        length_s=options.length_s,
    )  # fmt: skip
    verdict = run_faults(folder, options.seed, plan, options.lease_s)
    print(format_verdict(verdict))
    return 1 if verdict.faults or slow(verdict) else 0


if __name__ == "__main__":
    sys.exit(main())
