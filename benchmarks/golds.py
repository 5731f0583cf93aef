"""Check that `accuracy` accepts gold answers in five wrappings, and no other answers; and its time.

    python -m benchmarks.golds gsm8k/test.jsonl     GSM8K's golds
    python -m benchmarks.golds                      5,000 generated golds of 48 kinds

Each gold answer is wrapped in five ways and scored against its row (must be right), and against
another row with a different gold answer (must be wrong). The share of verdicts under 50 ms of processor
time must be 99.9%. The first 200 golds warm up and do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.gold_kinds import gold_pairs
from penstock.rewarders.rewards.accuracy import accuracy
from penstock.rewarders.rewards.answers import after_marker

WRAPPINGS = {
    "plain": "{}",
    "boxed": "so it is \\boxed{{{}}}",
    "<answer> tight": "<think>.</think><answer>{}</answer>",
    "<answer> spaced, over lines": "<think>.</think>\n<answer>\n {} \n</answer>\n",
    "after ####": "some steps: 1 + 2 = 3\n#### {}",
}
RIGHT_AT_LEAST, WRONG_AT_MOST, FAST_AT_LEAST = 0.995, 0.001, 0.999
FAST_S, WARM_UP = 0.05, 200


def read_golds(path: Path) -> list[str]:
    """Return the `answer` column: reasoning, then the gold answer after ####."""
    return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]


def different_answers(golds: list[str]) -> list[str]:
    """Return for each row the answer of the next row with a different answer."""
    values = [after_marker(gold).strip() for gold in golds]
    found = []
    for row, value in enumerate(values):
        step = next(n for n in range(1, len(values)) if values[(row + n) % len(values)] != value)
        found.append(values[(row + step) % len(values)])
    return found


def share_right(golds: list[str], answers: list[str], wrapping: str, times: list[float]) -> float:
    """Return the share of wrapped answers that `accuracy` scores as right; append each one's time."""
    right = 0
    for gold, answer in zip(golds, answers, strict=True):
        begin = time.process_time()
        right += accuracy([""], [wrapping.format(answer)], [gold]) == [1.0]
        times.append(time.process_time() - begin)
    return right / len(golds)


def main() -> int:
    """Print the shares. Return 1 if a share misses its bound, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golds", type=Path, nargs="?", help="JSON lines with `answer`")
    if path := parser.parse_args().golds:
        golds = read_golds(path)
        own, others = [after_marker(gold).strip() for gold in golds], different_answers(golds)
    else:
        golds, others = map(
            list, zip(*((own, other) for _, own, other in gold_pairs(7, 5000)), strict=True)
        )
        own = golds
    times: list[float] = []
    share_right(golds[:WARM_UP], others[:WARM_UP], "{}", [])
    holds = True
    print(f"{len(golds)} golds{'':<22}{'own':>10}{'another':>10}")
    for name, wrapping in WRAPPINGS.items():
        right = share_right(golds, own, wrapping, times)
        wrong = share_right(golds, others, wrapping, times)
        holds &= right >= RIGHT_AT_LEAST and wrong <= WRONG_AT_MOST
        print(f"{name:<33}{right:>10.2%}{wrong:>10.2%}", flush=True)
    fast = sum(passed < FAST_S for passed in times) / len(times)
    print(f"verdicts under 50 ms of processor time: {fast:.3%}; the longest: {max(times):.3f} s")
    return 0 if holds and fast >= FAST_AT_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
