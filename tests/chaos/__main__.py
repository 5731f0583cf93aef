"""kill -9 of everything, at random, all the time: nothing is lost, nothing is trained twice.

    python -m tests.chaos [--seed N] [--seconds S] [--limit-s S] [--lose-every N]
                          [--environments | --agents | --preempt] [--json] [--folder F]

runs learner, four actors with a fake engine, two rewarders and the queue server under a supervisor and
kills their processes, helpers included. Prints every kill, then a table and the verdict; exit code 1
if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from tests.chaos.plan import WHOLE_S, make_plan
from tests.chaos.run import run_chaos, say
from tests.chaos.verdict import Verdict


def format_verdict(verdict: Verdict) -> str:
    """The table for people."""
    lines = [f"{'process':<18}{'kills':>6}  at steps (3x2: two at step 3)"]
    lines += [f"{kind:<18}{len(steps):>6}  {_counted(steps)}" for kind, steps in verdict.kills.items()]
    states = ", ".join(f"{count} {state}" for state, count in sorted(verdict.states.items()))
    lines += [
        f"{'all':<18}{verdict.total:>6}",
        "",
        f"groups trained    {verdict.groups}",
        f"Updates           {verdict.updates}, the learner resumed {verdict.resumes} times",
        f"tickets           {states}",
        f"server            lost {verdict.entries_lost} acknowledged entries when it was killed",
        f"left at the end   {sum(verdict.left.values())} entries",
        f"replay            {verdict.replayed}",
        f"took              {verdict.took_s:g} s",
        *(f"FAULT: {fault}" for fault in verdict.faults),
        "verdict           "
        + (f"{len(verdict.faults)} faults" if verdict.faults else "0 lost, 0 twice"),
    ]
    return "\n".join(lines)


def _counted(steps: list[int]) -> str:
    return " ".join(
        f"{step}x{count}" if count > 1 else str(step) for step, count in sorted(Counter(steps).items())
    )


def main() -> int:
    """Run it in a new folder, or the one given."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description="kill -9 everything, at random.")
    parser.add_argument("--seed", type=int, default=1, help="decides which kinds are killed in turn")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="size of the run")
    parser.add_argument(
        "--limit-s", type=float, help="end a run that takes longer (default: five times S, at least 600)"
    )
    parser.add_argument("--lose-every", type=int, default=0, help="lose each n-th reply of the server")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--environments", action="store_true", help="rollouts of several turns")
    several.add_argument("--agents", action="store_true", help="rollouts of agents that own their loop")
    several.add_argument("--preempt", action="store_true", help="SIGTERM for actors, and no token lost")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--folder", type=Path, help="empty folder to use (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder {folder} is not empty: a run in it would go on; give a new one")
    say(f"the run's folder and its processes' lines (roles.log) are in {folder}")
    episodes = options.environments or options.agents
    plan = make_plan(options.seconds, episodes=episodes, preempt=options.preempt)
    plan = replace(plan, limit_s=options.limit_s or plan.limit_s)
    verdict = run_chaos(
        folder, plan, options.seed, lose_every=options.lose_every,
        environments=options.environments, agents=options.agents, preempt=options.preempt,
    )  # fmt: skip
    print(json.dumps(asdict(verdict), indent=1) if options.json else format_verdict(verdict))
    return 1 if verdict.faults else 0


if __name__ == "__main__":
    sys.exit(main())
