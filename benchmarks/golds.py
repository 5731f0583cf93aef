"""Check that `accuracy` accepts GSM8K's gold answers in five wrappings, and no other answers.

    python -m benchmarks.golds gsm8k/test.jsonl

Each row's gold answer is wrapped in five ways and scored against that row (must be right), and against
another row with a different gold answer (must be wrong).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from penstock.rewarders.rewards.accuracy import accuracy
from penstock.rewarders.rewards.answers import after_marker

WRAPPINGS = {
    "plain": "{}",
    "boxed": "so it is \\boxed{{{}}}",
    "<answer> tight": "<think>.</think><answer>{}</answer>",
    "<answer> spaced, over lines": "<think>.</think>\n<answer>\n {} \n</answer>\n",
    "after ####": "some steps: 1 + 2 = 3\n#### {}",
}
RIGHT_AT_LEAST, WRONG_AT_MOST = 0.995, 0.001


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


def share_right(golds: list[str], answers: list[str], wrapping: str) -> float:
    """Return the share of the wrapped answers that `accuracy` scores as right."""
    right = [
        accuracy([wrapping.format(answer)], [gold]) == [1.0]
        for gold, answer in zip(golds, answers, strict=True)
    ]
    return sum(right) / len(right)


def main() -> int:
    """Print the shares. Return 1 if a share misses its bound, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golds", type=Path, help="JSON lines with `answer`")
    golds = read_golds(parser.parse_args().golds)
    own = [after_marker(gold).strip() for gold in golds]
    holds = True
    print(f"{len(golds)} golds{'':<22}{'own':>10}{'another':>10}")
    for name, wrapping in WRAPPINGS.items():
        right, wrong = (
            share_right(golds, own, wrapping),
            share_right(golds, different_answers(golds), wrapping),
        )
        holds &= right >= RIGHT_AT_LEAST and wrong <= WRONG_AT_MOST
        print(f"{name:<33}{right:>10.2%}{wrong:>10.2%}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
