"""A run of the whole product on the tiny model of conversations, and what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_SETTINGS = {
    "LEARNER_GROUPS_PER_STEP": "32", "LEARNER_NUM_GENERATIONS": "8",
    "LEARNER_MAX_PROMPT_LENGTH": "16", "LEARNER_TOOL_TIMEOUT_S": "20",
    "LEARNER_LEARNING_RATE": "2e-4", "LEARNER_WARMUP_STEPS": "2", "LEARNER_ADAM_BETA2": "0.95",
    "LEARNER_EVAL_TEMPERATURE": "1.0", "LEARNER_SAVE_STEPS": "1000",
    "ACTOR_EPISODE_WORKERS": "48", "REWARDER_WORKERS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def run_training(folder: Path, settings: dict[str, str]) -> float:
    """Run `penstock up` until the training ended; return the seconds that the run took.

    The run's folder is made in `folder`. `settings` are variables of the run, and replace those that
    both benchmarks have in common. What the run writes to its terminal is stored in run.log.
    """
    folder.chmod(0o755)
    variables = os.environ | _SETTINGS | {"RUN_DIR": str(folder)} | settings
    began = time.monotonic()
    with (folder / "run.log").open("w") as log:
        command = [sys.executable, "-m", "penstock.deploy", "up"]
        subprocess.run(
            command, env=variables, cwd=_ROOT, stdout=log, stderr=log, timeout=1800, check=True
        )
    return time.monotonic() - began


def heldout_means(run: Path) -> dict[int, dict[str, float]]:
    """Return by step the mean of each reward over the held-out questions of a run's folder.

    A reward that does not apply to an answer counts as 0.
    """
    found: dict[int, list[dict[str, float | None]]] = {}
    for line in (run / "evaluations.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], []).append(row["rewards"][0])
    return {
        step: {name: sum(row[name] or 0.0 for row in rows) / len(rows) for name in rows[0]}
        for step, rows in sorted(found.items())
    }


def print_now(line: str) -> None:
    """Print a line at once, also where the output is a file."""
    print(line, flush=True)
