"""Measure what a hint after a wrong attempt is worth, with real vLLM, queue server and learner.

    python -m benchmarks.retry [--seeds 1 2 3] [--steps 60] [--folder F]

A question lists three digits in ascending order, and one of them is the answer. There are two attempts.
For each seed, a tiny model of conversations is pre-trained and then trained twice. In one run a wrong
attempt is answered with "too low" or "too high" (deploy/environments/retry.py), in the other with "no"
(benchmarks/retry_game.py). Base model, seed, questions and number of Updates are equal. Without a hint
at most 2/3 of the answers can be found. With hints all can be found: the middle one is guessed first,
and the hint says which of the others is right.
The goal is that the hint's accuracy is at least 10 points higher for each seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path

from benchmarks.retry_game import ATTEMPTS, GuessWithoutHint
from benchmarks.talk_model import Talk, make_talk_model
from benchmarks.talk_run import heldout_means, print_now, run_training
from penstock.actors.tool_calls import read_calls
from penstock.deploy.environments.retry import Guess

GOAL = 0.1
PLAIN_SHARE = 0.5
"""Share of the conversations for pre-training that have numbers in place of calls, and hints after them.
A language model knows the words: this one knows what hints mean, but hardly how to call a tool."""
VALID_SHARE = 0.06
"""Share of the other conversations whose calls are valid. Under 20% of the base model's calls are to be:
with 0.1 they were 13.5, 10.2 and 23.1% for the seeds 1 to 3."""
AGREEING_SHARE = 0.8
"""Share of the second attempts in pre-training that follow the hint. All others are other numbers, at
random. A model that repeats its attempts would have to unlearn that first, with and without hints."""

MIDDLE_SHARE = 0.5
"""Share of the first attempts in pre-training that are the middle number for sure. The others are any of
the three. After a wrong middle number a hint tells the answer, after another it leaves two."""

PRETRAINING_STEPS = 2000
"""After 500 the model has not begun to copy digits from the question, and after 1000 it copies 80%."""

Numbers = tuple[int, int, int]
LISTS: list[Numbers] = list(combinations(range(10), 3))
"""The numbers of each possible question, of one digit each: the model learns soon to copy one digit."""
HELDOUT_LISTS = 24

ARMS = {"hint": "deploy/environments/retry.py:Guess", "no": "benchmarks/retry_game.py:GuessWithoutHint"}
"""By the name of the run, its environment."""

_ROOT = Path(__file__).parents[1]
_COUNTED = ("within_two", "at_first", "calls", "valid_calls")


def draw_question(draw: random.Random, lists: Sequence[Numbers]) -> tuple[str, int]:
    """Return a question such as "1 3 8?", one of `lists`, and its answer, one of the three numbers."""
    numbers = draw.choice(lists)
    return f"{' '.join(map(str, numbers))}?", draw.choice(numbers)


def write_questions(folder: Path, seed: int, train: int = 4000, heldout: int = 400) -> None:
    """Write train.jsonl and heldout.jsonl with so many questions and their answers.

    The numbers of a held-out question are those of no question for training.
    """
    draw = random.Random(seed)
    shuffled = draw.sample(LISTS, len(LISTS))
    parts = {
        "heldout.jsonl": (shuffled[:HELDOUT_LISTS], heldout),
        "train.jsonl": (shuffled[HELDOUT_LISTS:], train),
    }
    for name, (lists, count) in parts.items():
        drawn = [draw_question(draw, lists) for _ in range(count)]
        rows = [json.dumps({"question": question, "answer": answer}) for question, answer in drawn]
        (folder / name).write_text("\n".join(rows) + "\n")


def make_talk(draw: random.Random) -> Talk:
    """Return a conversation for pre-training, with hints in half of the cases.

    The attempts of one conversation are all plain numbers, or all valid calls, or all invalid calls:
    with another key, with a bracket less, or a mere number in place of a call, which ends the
    conversation. So does the second invalid call.
    """
    question, secret = draw_question(draw, LISTS)
    game = draw.choice((Guess, GuessWithoutHint))()
    game.reset(answer=secret)
    talk: Talk = [(f"<user>{question}<eos><assistant>", False)]
    if draw.random() < PLAIN_SHARE:
        return talk + _plain_attempts(draw, question, game)
    valid = draw.random() < VALID_SHARE
    number, answer = 0, ""
    for _ in range(ATTEMPTS):
        number = _choose(draw, question, number, answer)
        call = json.dumps({"name": "guess", "arguments": {"number": number}})
        if not valid:
            call = draw.choice((call.replace('"name"', '"tool"'), call[:-1], ""))
        if not call:
            return [*talk, (f"{number}<eos>", True)]
        text = f"<tool_call>{call}</tool_call>"
        answer = game.guess(number) if valid else read_calls(text)[1][0].error
        talk += [(f"{text}<eos>", True), (f"<tool>{answer}<eos><assistant>", False)]
        if answer == "right":
            break
    return [*talk, ("done<eos>", True)] if valid else talk[:-1]


def _plain_attempts(draw: random.Random, question: str, game: Guess | GuessWithoutHint) -> Talk:
    """Return up to two attempts that are plain numbers, with the game's answers, and the end."""
    talk: Talk = []
    number, answer = 0, ""
    for _ in range(ATTEMPTS):
        number = _choose(draw, question, number, answer)
        answer = game.guess(number)
        talk += [(f"{number}<eos>", True), (f"<tool>{answer}<eos><assistant>", False)]
        if answer == "right":
            break
    return [*talk, ("done<eos>", True)]


def _choose(draw: random.Random, question: str, last: int, answer: str) -> int:
    """Return the next attempt: mostly the middle number first, then one that agrees with the answer."""
    numbers = [int(one) for one in question.removesuffix("?").split()]
    if not answer and draw.random() < MIDDLE_SHARE:
        return numbers[1]
    others = [one for one in numbers if one != last] if answer else numbers
    agreeing = {
        "too low": [one for one in others if one > last],
        "too high": [one for one in others if one < last],
    }.get(answer, others)
    return draw.choice(agreeing if draw.random() < AGREEING_SHARE else others)


def train(folder: Path, arm: str, model: Path, steps: int, seed: int) -> float:
    """Train the model with the arm's environment; return the seconds that the run took.

    The run is made in a new folder of `folder` with the arm's name.
    """
    (folder / arm).mkdir()
    write_questions(folder / arm, seed)
    counted = [f"{_ROOT / 'benchmarks/retry_game.py'}:{name}" for name in _COUNTED]
    settings = {
        "RUN_NAME": arm, "LEARNER_MODEL": str(model), "LEARNER_SEED": str(seed),
        "LEARNER_DATASET": str(folder / arm / "train.jsonl"),
        "LEARNER_EVAL_DATASET": str(folder / arm / "heldout.jsonl"),
        "LEARNER_MAX_STEPS": str(steps), "LEARNER_EVAL_STEPS": str(steps),
        "LEARNER_LEARNING_RATE": "5e-4", "LEARNER_LR_SCHEDULER_TYPE": "linear",
        "LEARNER_MAX_COMPLETION_LENGTH": "240", "LEARNER_MAX_TOOL_CALLING_ITERATIONS": str(ATTEMPTS),
        "LEARNER_REWARDS": ",".join(["environment", *counted]),
        "LEARNER_REWARD_WEIGHTS": ",".join(["1", *("0" for _ in counted)]),
        "LEARNER_ENVIRONMENT": str(_ROOT / ARMS[arm]),
    }  # fmt: skip
    return run_training(folder / arm, settings)


def report(run: Path, took_s: float) -> float:
    """Print a run's accuracy by step; return the accuracy on the held-out questions at the end."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        within, first = (row[f"rewards/{name}/mean"] for name in ("within_two", "at_first"))
        calls, failed = row["tools/call_frequency"], row["tools/failure_frequency"]
        print_now(
            f"step {row['step']:>3}  right {within:.2f}  at first {first:.2f}  calls {calls:.2f}  "
            f"failed {failed:.2f}"
        )
    means = heldout_means(run)
    for step, row in means.items():
        print_now(
            f"{run.name}, held-out questions after step {step}: {row['within_two']:.1%} right in two "
            f"attempts, {row['at_first']:.1%} in the first; "
            f"{row['valid_calls'] / max(row['calls'], 1e-9):.1%} of the calls valid"
        )
    print_now(f"the run took {took_s:.0f} s, with the start of vLLM")
    return max(means.items())[1]["within_two"]


def make_model(folder: Path, seed: int) -> None:
    """Make `folder` and pre-train the seed's base model in its folder `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    make_talk_model(folder / "model", seed, make_talk, partial(_tell, seed), PRETRAINING_STEPS)


def _tell(seed: int, line: str) -> None:
    print_now(f"seed {seed}: {line}")


def compare(folder: Path, steps: int, seed: int) -> float:
    """Train the model in `folder` with and without hints; return the difference in accuracy."""
    accuracy = {}
    for arm in ARMS:
        took_s = train(folder, arm, folder / "model", steps, seed)
        accuracy[arm] = report(folder / arm / arm, took_s)
    return accuracy["hint"] - accuracy["no"]


def main() -> int:
    """Measure each seed; return 1 if the least difference is under the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.retry", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="folder for the runs (default: a new one)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="penstock-retry-"))
    folders = [folder / f"seed-{seed}" for seed in options.seeds]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:  # each needs one core
        list(pool.map(make_model, folders, options.seeds))
    differences = []
    for seed, own in zip(options.seeds, folders, strict=True):
        differences.append(compare(own, options.steps, seed))
        print_now(f"seed {seed}: {differences[-1]:+.1%} with the hint")
    found = min(differences)
    print_now(f"least of {len(differences)}: {found:+.1%} with the hint; the goal is {GOAL:+.0%}")
    return int(found < GOAL)


if __name__ == "__main__":
    sys.exit(main())
