"""kill -9 of every kind of process, once each, in one run under `penstock up`.

    python -m tests.e2e.kills [--real] [--folder FOLDER]

prints at which steps the kills fell and the judge's verdict; --real uses vLLM in place of the fake
engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.site import FAKE_PROCFILE, REAL_PROCFILE, Site
from tests.judge import judge

VICTIMS = ("actor.1", "rewarder.1", "learner.1", "queue.1")


def run_with_kills(site: Site, every: int, timeout_s: float) -> dict[str, Any]:
    """Kill each victim in turn, `every` steps apart; the steps, exit code and verdict."""
    kills: dict[str, int] = {}
    with site.start():
        for number, victim in enumerate(VICTIMS, 1):
            goal = number * every
            site.wait_for(lambda goal=goal: site.steps() >= goal, f"step {goal}", timeout_s)
            kills[victim] = site.kill(victim)
        code = site.wait(timeout_s)
    return {"kills_at_step": kills, "exit_code": code, **judge(site.run_folder)}


def main() -> int:
    """Run it in a new folder, or the one given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="vLLM instead of the fake engine")
    parser.add_argument("--folder", type=Path, help="empty folder to use (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    procfile = REAL_PROCFILE if options.real else FAKE_PROCFILE
    site = Site(folder, procfile, LEARNER_MAX_STEPS="24", LEARNER_SAVE_STEPS="5", RUN_LEASE_S="10")
    verdict = run_with_kills(site, every=4, timeout_s=600)
    print(json.dumps(verdict, indent=1))
    return 1 if verdict["faults"] or verdict["exit_code"] else 0


if __name__ == "__main__":
    sys.exit(main())
