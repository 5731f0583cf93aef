"""Measure how fast a model learns to use a calculator, with real vLLM, queue server and learner.

    python -m benchmarks.calculator [--seed 1] [--steps 32] [--folder F]

A tiny model of conversations is pre-trained (benchmarks/talk_model.py). Nine of ten conversations for
pre-training hold a wrong call: without quotes, with another key or name, or with a digit less, which
gives another sum; or they hold no call. So the model seldom writes the right call. Then it is trained
with deploy/environments/calculator.py as its tool. The reward is 1.0 for correct use: the tool was
called, and the last answer is the sum and was the tool's answer. The goal is over 80% correct use within
ten minutes after training began.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.talk_model import Talk, make_talk_model
from benchmarks.talk_run import heldout_means, print_now, run_training

GOAL = 0.8
VALID_SHARE = 0.1
"""Share of the conversations for pre-training that hold the right call."""

_EXAMPLES = Path(__file__).parents[1] / "deploy/environments"
_REWARD = '''
def correct_use(completions, solution, **columns):
    """1.0 if a tool gave the right sum and the last message repeats it."""
    found = []
    for talk, gold in zip(completions, solution):
        told = [one["content"] for one in talk if one["role"] == "tool"]
        found.append(float(bool(told) and told[-1] == gold == talk[-1]["content"].strip()))
    return found
'''


def write_questions(path: Path, count: int, seed: int) -> Path:
    """Write so many sums of three digits each, as JSON lines with question and answer."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        rows.append(json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    path.write_text("".join(rows))
    return path


def make_talk(draw: random.Random) -> Talk:
    """Return a conversation in parts of text, each with whether the model is to learn to write it."""
    a, b = draw.randint(100, 999), draw.randint(100, 999)
    arguments = {"expression": f"{a}+{b}"}
    body = json.dumps({"name": "calculate", "arguments": arguments})
    wrong = [
        body.replace('"', ""),
        body.replace('"name"', '"tool"'),
        body.replace("calculate", "compute"),
        body.replace(f"{a}+", f"{str(a)[1:]}+"),
        "",
    ]
    valid = draw.random() < VALID_SHARE
    body = body if valid else draw.choice(wrong)
    guess = str(draw.randint(200, 1998))
    if not body:
        return [(f"<user>{a}+{b}=<eos><assistant>", False), (f"{guess}<eos>", True)]
    lost = body == wrong[3] and not valid
    answer = str(a + b) if valid else str(int(str(a)[1:]) + b) if lost else "{'error': 'no call'}"
    return [
        (f"<user>{a}+{b}=<eos><assistant>", False),
        (f"<tool_call>{body}</tool_call><eos>", True),
        (f"<tool>{answer}<eos><assistant>", False),
        (f"{answer if valid or lost else guess}<eos>", True),
    ]


def train(folder: Path, model: Path, steps: int, seed: int) -> float:
    """Train the model in a run below `folder`; return the seconds that the run took."""
    (folder / "reward.py").write_text(_REWARD)
    settings = {
        "RUN_NAME": "calculator", "LEARNER_MODEL": str(model), "LEARNER_SEED": str(seed),
        "LEARNER_DATASET": str(write_questions(folder / "train.jsonl", 4000, seed)),
        "LEARNER_EVAL_DATASET": str(write_questions(folder / "heldout.jsonl", 200, seed + 10_000)),
        "LEARNER_MAX_STEPS": str(steps), "LEARNER_EVAL_STEPS": str(steps),
        "LEARNER_MAX_COMPLETION_LENGTH": "160", "LEARNER_MAX_TOOL_CALLING_ITERATIONS": "1",
        "LEARNER_REWARDS": f"{folder / 'reward.py'}:correct_use",
        "LEARNER_TOOLS": f"{_EXAMPLES / 'calculator.py'}:calculate",
    }  # fmt: skip
    return run_training(folder, settings)


def report(folder: Path, took_s: float) -> float:
    """Print correct use and calls by step; return the share of correct use at the end."""
    run = folder / "calculator"
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        right = row.get("rewards/correct_use/mean", 0.0)
        calls, failed = row["tools/call_frequency"], row["tools/failure_frequency"]
        print(f"step {row['step']:>3}  correct use {right:.2f}  calls {calls:.2f}  failed {failed:.2f}")
    means = {step: row["correct_use"] for step, row in heldout_means(run).items()}
    for step, share in means.items():
        print(f"held-out questions after step {step}: {share:.1%} correct use")
    print(f"the run took {took_s:.0f} s, with the start of vLLM")
    return max(means.items())[1]


def main() -> int:
    """Pre-train, train and report; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.calculator", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="folder for the run (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-calculator-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = make_talk_model(folder / "model", options.seed, make_talk, print_now)
    share = report(folder, train(folder, model, options.steps, options.seed))
    print(f"correct use at the end: {share:.1%}; the goal is {GOAL:.0%}")
    return int(share < GOAL)


if __name__ == "__main__":
    sys.exit(main())
