"""Train SmolLM2-135M-Instruct to add, on one GPU: here in two ways, or with TRL and colocated vLLM.

    python -m benchmarks.gpu_arithmetic {together,turns,TRL} --model FOLDER [--steps 80] [--tiny]

The questions are "a + b = ?" with numbers of one and two digits; an answer is right if its last number
is the sum. A step has 32 questions with 16 completions of at most 64 tokens, at a learning rate of 1e-5
in bfloat16; groups without spread are trained too, as TRL does. `together`: learner and actor use the
GPU at the same time. `turns`: they take turns (LEARNER_SHARE_DEVICE). Both use
deploy/recipes/smollm2-arithmetic.env. The reward of a moment is the mean of the last three steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GROUPS, GENERATIONS = 32, 16
MARKS = (0.05, 0.10, 0.20, 0.30, 0.40)
_ROOT = Path(__file__).parents[1]
_POLL_S, _LEAVE_S = 0.1, 30.0
_RATES = 10
"""The rate is that of the last ten steps."""

WAYS = {
    "together": {"ACTOR_GPU_MEMORY_UTILIZATION": "0.4", "LEARNER_MAX_STALENESS": "1"},
    "turns": {
        "ACTOR_GPU_MEMORY_UTILIZATION": "0.8", "LEARNER_MAX_STALENESS": "0",
        "LEARNER_SHARE_DEVICE": "true",
    },
}  # fmt: skip
"""Settings beside those of the recipe."""

TINY = {
    "LEARNER_GROUPS_PER_STEP": "4", "LEARNER_MAX_PROMPT_LENGTH": "32",
    "LEARNER_MAX_COMPLETION_LENGTH": "8",
    "LEARNER_DTYPE": "float32", "LEARNER_PROMPT_TEMPLATE": "none", "ACTOR_KV_CACHE_GIB": "0.2",
}  # fmt: skip


def is_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1.0 for each completion whose last number is the sum, else 0.0."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    last = [(re.findall(r"-?\d+", text) or [""])[-1] for text in texts]
    return [float(found == right) for found, right in zip(last, answer, strict=True)]


def write_questions(path: Path, count: int = 10_000) -> None:
    """Write questions of numbers that have one or two digits with equal chance."""
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        a, b = (draw.randint(*draw.choice([(0, 9), (10, 99)])) for _ in "ab")
        rows.append({"question": f"{a} + {b} = ?", "answer": str(a + b)})
    path.write_text("\n".join(map(json.dumps, rows)))


def command(options: argparse.Namespace, folder: Path) -> tuple[list[str], dict[str, str], Path]:
    """The command that trains, its environment, and the file that gets a line per step."""
    way, questions = options.way, folder / "sums.jsonl"
    write_questions(questions)
    if way == "TRL":
        arguments = [str(value) for value in (options.model, questions, folder, options.steps)]
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_trl", *arguments]
        path = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(options.packages.absolute())])
        )
        tiny = {"GPU_TRL_TINY": "1"} if options.tiny else {}
        return words, os.environ | {"PYTHONPATH": path} | tiny, folder / "rewards.jsonl"
    variables = os.environ | {
        "RUN_NAME": "run", "RUN_DIR": str(folder), "LEARNER_MODEL": str(options.model.absolute()),
        "LEARNER_DATASET": str(questions), "LEARNER_EVAL_STEPS": "0", "LEARNER_EVAL_HOLDOUT": "0",
        "LEARNER_REWARDS": f"{shutil.copy(__file__, folder)}:is_right",  # where the sandbox can read it
        "LEARNER_MAX_STEPS": str(options.steps), "LEARNER_SAVE_STEPS": "1000",
        "LEARNER_FILTER_ZERO_STD": "false", "ACTOR_MAX_NUM_SEQS": "512", "REWARDER_WORKERS": "2",
        "LEARNER_MICRO_BATCH_TOKENS": "32768",
        **WAYS[way], **(TINY if options.tiny else {}),
    }  # fmt: skip
    recipe = "deploy/recipes/smollm2-arithmetic.env"
    words = [sys.executable, "-W", "ignore", "-m", "penstock.deploy", "up", "--env-file", recipe]
    return words, variables, folder / "run" / "metrics.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def train(
    words: list[str], variables: dict[str, str], path: Path, log: Path, steps: int
) -> tuple[list[float], list[dict[str, Any]], str]:
    """Train; return the seconds from the start to each step's end, their rows, and the error or ""."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))  # report what there is
    began, ends_s = time.monotonic(), list[float]()
    with log.open("w") as output:
        process = subprocess.Popen(words, env=variables, cwd=_ROOT, stdout=output, stderr=output)
    try:
        while process.poll() is None and len(ends_s) < steps and not stopping:
            ends_s += [time.monotonic() - began] * (len(rows_of(path)) - len(ends_s))
            time.sleep(_POLL_S)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_LEAVE_S / (10 if stopping else 1))
        except subprocess.TimeoutExpired:
            process.kill()
    rows = rows_of(path)
    error = "" if len(rows) >= steps else f"{len(rows)} of {steps} steps; {log.read_text()[-3000:]}"
    return ends_s, rows, error


def figures_of(ends_s: list[float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """When each reward was reached, the rate, and what the last step's metrics say."""
    rewards = [row.get("reward", 0.0) for row in rows[: len(ends_s)]]
    smooth = [statistics.mean(rewards[max(0, at - 2) : at + 1]) for at in range(len(rewards))]
    found: dict[str, Any] = {"steps": len(ends_s), "first step at s": ends_s[0] if ends_s else None}
    for mark in MARKS:
        step = next((at for at, value in enumerate(smooth) if value >= mark), None)
        found[f"{mark:.2f}"] = None if step is None else {
            "step": step + 1, "s": ends_s[step], "s after the first step": ends_s[step] - ends_s[0]
        }  # fmt: skip
    last = min(_RATES, len(ends_s) - 1)
    if last > 0:
        each_s = (ends_s[-1] - ends_s[-1 - last]) / last
        found |= {"step_s": each_s, "completions_per_s": GROUPS * GENERATIONS / each_s}
        found["step_s of all"] = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    found["rewards"] = [round(value, 3) for value in rewards]
    return found | {"last": rows[-1] if rows else {}}


def main() -> int:
    """Train, print the figures; return 1 if not all steps were made."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_arithmetic", description=__doc__)
    parser.add_argument("way", choices=[*WAYS, "TRL"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--packages", type=Path, default=Path(".venv-rewards"), help="folder with TRL")
    parser.add_argument("--tiny", action="store_true", help="few short completions, for a CPU")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix=f"penstock-{options.way}-"))
    folder.chmod(0o755)
    words, variables, path = command(options, folder)
    ends_s, rows, error = train(words, variables, path, folder / "log", options.steps)
    print((folder / "log").read_text()[-20_000:], file=sys.stderr)
    print(json.dumps(figures_of(ends_s, rows) | {"error": error}), flush=True)
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
