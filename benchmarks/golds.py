"""Is `accuracy` right on GSM8K's gold answers, however an answer is wrapped, and only on its own?

    python -m benchmarks.golds gsm8k/test.jsonl

Each row's gold, in five wrappings, is scored against that row (must be right) and against another row
whose gold differs (must be wrong).
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
    """The `answer` column: reasoning, then the gold after ####."""
    return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]


def others(golds: list[str]) -> list[str]:
    """For each row the answer of the next row whose value differs."""
    values = [after_marker(gold).strip() for gold in golds]
    found = []
    for row, value in enumerate(values):
        step = next(n for n in range(1, len(values)) if values[(row + n) % len(values)] != value)
        found.append(values[(row + step) % len(values)])
    return found


def share(golds: list[str], answers: list[str], wrapping: str) -> float:
    """Share of the answers that are scored as right."""
    right = [
        accuracy([""], [wrapping.format(answer)], [gold]) == [1.0]
        for gold, answer in zip(golds, answers, strict=True)
    ]
    return sum(right) / len(right)


def main() -> int:
    """Print the shares; exit code 1 if one misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golds", type=Path, help="JSON lines with `answer`")
    golds = read_golds(parser.parse_args().golds)
    own = [after_marker(gold).strip() for gold in golds]
    holds = True
    print(f"{len(golds)} golds{'':<22}{'own':>10}{'another':>10}")
    for name, wrapping in WRAPPINGS.items():
        right, wrong = share(golds, own, wrapping), share(golds, others(golds), wrapping)
        holds &= right >= RIGHT_AT_LEAST and wrong <= WRONG_AT_MOST
        print(f"{name:<33}{right:>10.2%}{wrong:>10.2%}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
