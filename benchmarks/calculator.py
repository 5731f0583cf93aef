"""Measure how fast a model learns to use a calculator, with real vLLM, queue server and learner.

    python -m benchmarks.calculator [--seed 1] [--steps 40] [--folder F]

A tiny model of conversations is pre-trained (benchmarks/talk_model.py), which seldom writes the right
call. Then it is trained with deploy/environments/calculator.py as its tool. The reward is 1.0 for
correct use: the tool was called, and the last answer is the sum and was the tool's answer. The goal is
over 80% correct use within ten minutes after training began.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.talk_model import make_talk_model, write_questions

GOAL = 0.8
_ROOT = Path(__file__).parents[1]
_REWARD = '''
def correct_use(completions, solution, **columns):
    """1.0 if a tool gave the right sum and the last message repeats it."""
    found = []
    for talk, gold in zip(completions, solution):
        told = [one["content"] for one in talk if one["role"] == "tool"]
        found.append(float(bool(told) and told[-1] == gold == talk[-1]["content"].strip()))
    return found
'''
_SETTINGS = {
    "RUN_NAME": "calculator",
    "LEARNER_GROUPS_PER_STEP": "32", "LEARNER_NUM_GENERATIONS": "8",
    "LEARNER_MAX_PROMPT_LENGTH": "16", "LEARNER_MAX_COMPLETION_LENGTH": "160",
    "LEARNER_TOOL_TIMEOUT_S": "20", "LEARNER_MAX_TOOL_CALLING_ITERATIONS": "1",
    "LEARNER_LEARNING_RATE": "2e-4", "LEARNER_WARMUP_STEPS": "2", "LEARNER_ADAM_BETA2": "0.95",
    "LEARNER_EVAL_TEMPERATURE": "1.0", "LEARNER_SAVE_STEPS": "1000",
    "ACTOR_EPISODE_WORKERS": "48", "REWARDER_WORKERS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def train(folder: Path, model: Path, steps: int, seed: int) -> float:
    """Train the model in a run below `folder`; return the seconds that the run took."""
    (folder / "reward.py").write_text(_REWARD)
    folder.chmod(0o755)
    settings = _SETTINGS | {
        "RUN_DIR": str(folder), "LEARNER_MODEL": str(model), "LEARNER_SEED": str(seed),
        "LEARNER_DATASET": str(write_questions(folder / "train.jsonl", 4000, seed)),
        "LEARNER_EVAL_DATASET": str(write_questions(folder / "heldout.jsonl", 200, seed + 10_000)),
        "LEARNER_MAX_STEPS": str(steps), "LEARNER_EVAL_STEPS": str(steps),
        "LEARNER_REWARDS": f"{folder / 'reward.py'}:correct_use",
        "LEARNER_TOOLS": f"{_ROOT / 'deploy/environments/calculator.py'}:calculate",
    }  # fmt: skip
    with (folder / "run.log").open("w") as log:
        command = [sys.executable, "-m", "penstock.deploy", "up"]
        began = time.monotonic()
        subprocess.run(
            command,
            env=os.environ | settings,
            cwd=_ROOT,
            stdout=log,
            stderr=log,
            timeout=1800,
            check=True,
        )
    return time.monotonic() - began


def report(folder: Path, took_s: float) -> float:
    """Print correct use and calls by step; return the share of correct use at the end."""
    run = folder / "calculator"
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        right = row.get("rewards/correct_use/mean", 0.0)
        calls, failed = row["tools/call_frequency"], row["tools/failure_frequency"]
        print(f"step {row['step']:>3}  correct use {right:.2f}  calls {calls:.2f}  failed {failed:.2f}")
    found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    shares = {}
    for row in found:
        shares.setdefault(row["step"], []).append(row["rewards"][0]["correct_use"] or 0.0)
    means = {step: sum(values) / len(values) for step, values in sorted(shares.items())}
    for step, share in means.items():
        print(f"held-out questions after step {step}: {share:.1%} correct use")
    print(f"the run took {took_s:.0f} s, with the start of vLLM")
    return max(means.items())[1]


def main() -> int:
    """Pre-train, train and report; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.calculator", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="folder for the run (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-calculator-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = make_talk_model(folder / "model", options.seed, lambda line: print(line, flush=True))
    share = report(folder, train(folder, model, options.steps, options.seed))
    print(f"correct use at the end: {share:.1%}; the goal is {GOAL:.0%}")
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
