"""The demo's task: sums of two-digit numbers, such as `37+45=`, in three splits.

Each operand pair is in one split only: 37+45 and 45+37 are never in two. Held-out accuracy therefore
measures the skill and not the memory of a sum.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement
from pathlib import Path

from penstock.common.errors import DataError
from penstock.common.files.atomic import make_folder

OPERANDS = range(10, 100)
HELDOUT_PAIRS = 600
TRAIN_PAIRS = 1500

_QUESTION = re.compile(r"(\d+)\+(\d+)=")

Pair = tuple[int, int]


class TaskError(DataError):
    """A task file has a wrong label, an unreadable question, or an operand pair of another split."""


@dataclass(frozen=True)
class Problem:
    """One question and its only right answer, for example `37+45=` and `82`."""

    question: str
    answer: str


@dataclass(frozen=True)
class TaskFiles:
    """The three splits as JSON lines with the string columns `question` and `answer`."""

    pretrain: Path
    train: Path
    heldout: Path


def write_task(folder: Path, seed: int) -> TaskFiles:
    """Write pretrain.jsonl, train.jsonl and heldout.jsonl into `folder`, check them, return their paths.

    The same seed writes the same bytes. 600 pairs of operands are held out, 1500 are for training, all
    others for pre-training. Pre-training and training hold every question of their pairs. The held-out
    split holds one question per pair, so that its questions are independent. Files there are replaced.
    Raise TaskError if the check fails, ConfigError if the folder cannot be made.
    """
    rng = random.Random(seed)
    pairs = list(combinations_with_replacement(OPERANDS, 2))
    rng.shuffle(pairs)
    heldout_pairs, rest = pairs[:HELDOUT_PAIRS], pairs[HELDOUT_PAIRS:]
    make_folder(folder, "--dir")
    files = TaskFiles(*(folder / f"{split}.jsonl" for split in ("pretrain", "train", "heldout")))
    for path, chosen in ((files.pretrain, rest[TRAIN_PAIRS:]), (files.train, rest[:TRAIN_PAIRS])):
        problems = [problem for pair in chosen for problem in problems_of(pair)]
        _write_problems(path, rng.sample(problems, len(problems)))
    _write_problems(files.heldout, [rng.choice(problems_of(pair)) for pair in heldout_pairs])
    check_task(files)
    return files


def check_task(files: TaskFiles) -> None:
    """Raise TaskError if an answer is wrong, a question unreadable, or a pair in two of the files.

    A pair is the two operands of a sum in any order. The files are only read.
    """
    owner: dict[Pair, Path] = {}
    for path in (files.pretrain, files.train, files.heldout):
        pairs = {_checked_pair(problem, path) for problem in read_problems(path)}
        for pair in pairs & owner.keys():
            raise TaskError(
                f"the operands {pair[0]} and {pair[1]} occur in {owner[pair]} and in {path}, expected "
                "each pair in one split: end other demos in this folder, then start again"
            )
        owner.update(dict.fromkeys(pairs, path))


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of the split in `path`, in the file's order, one per line.

    Raise OSError if the file cannot be read, ValueError for a line that is no JSON or a text that is no
    UTF-8, TypeError for other columns than question and answer.
    """
    return [Problem(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def operand_pair(question: str) -> Pair:
    """Return the operands of a question, the smaller one first: (37, 45) of `45+37=`.

    Raise TaskError for a question of another form.
    """
    match = _QUESTION.fullmatch(question)
    if match is None:
        raise TaskError(f"cannot read {question!r}: expected 37+45=; start `penstock demo` again")
    low, high = sorted(map(int, match.groups()))
    return low, high


def problems_of(pair: Pair) -> list[Problem]:
    """Return every question about `pair` with its answer: both orders, or one if its numbers are equal.

    Example: (37, 45) gives `37+45=` and `45+37=`, each with the answer `82`.
    """
    return [
        Problem(f"{one}+{other}=", str(sum(pair))) for one, other in dict.fromkeys((pair, pair[::-1]))
    ]


def _write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write problems to `path` as JSON lines, in their order; replace what the file held."""
    lines = (json.dumps(asdict(problem)) + "\n" for problem in problems)
    path.write_text("".join(lines), encoding="utf-8")


def _checked_pair(problem: Problem, path: Path) -> Pair:
    """Return a problem's operands, the smaller first. Raise TaskError for a wrong answer or question.

    `path` is the problem's file, which the error of a wrong answer names.
    """
    pair = operand_pair(problem.question)
    expected = str(sum(pair))
    if problem.answer != expected:
        raise TaskError(
            f"{path}: {problem.question} is labelled {problem.answer!r}, expected {expected!r}: "
            "start `penstock demo` again, which writes the file anew"
        )
    return pair
