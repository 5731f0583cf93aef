"""Metrics of an evaluation: avg@k, pass@k, maj@k. Pure.

A completion is right if its main reward is at least a threshold, by default 1: accuracy and acc give 1,
correctness 1.5 or 2.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.learner.streams.evaluation import Answer

_CLEAN = re.compile(r"[\s$]|\\[ ,!;]|(?<=\d),(?=\d{3}(?!\d))")


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance that k completions, drawn from n with `right` right ones, hold a right one.

    No completion is drawn twice. Raise ZeroDivisionError if k is above n, ValueError below 0.
    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), eq. 1.
    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> bool:
    """Return whether the most frequent of `answers` is right. Of equally frequent ones the first wins.

    `right` says of each answer whether it is right. Answers are compared as text without spaces (LaTeX's
    too), dollars and thousands separators: "$1,000" and "1000" are equal. If the rewarder judged equal
    answers differently, the first of them counts. Empty answers do not count; if all are empty, or there
    is none, return False.
    """
    cleaned = [_CLEAN.sub("", answer) for answer in answers]
    votes = Counter(filter(None, cleaned)).most_common(1)
    return bool(votes) and right[cleaned.index(votes[0][0])]


def judge(answer: Answer, main_reward: str, right_from: float | None) -> list[bool | None]:
    """Return for each completion whether it is right: its reward `main_reward` is `right_from` or more.

    None stands for a completion that was not scored, that the reward does not apply to, or, if
    `right_from` is None, for every completion.
    """
    scored = set(answer.scored() if right_from is not None else ())
    values = [
        row.get(main_reward) if index in scored else None for index, row in enumerate(answer.rewards)
    ]
    return [None if value is None else value >= (right_from or 0.0) for value in values]


def summarise(
    answers: Sequence[Answer], main_reward: str, right_from: float | None = 1.0
) -> dict[str, float]:
    """Return the metrics of an evaluation, by their names in metrics.jsonl, from an Answer per question.

    eval/questions counts the questions, eval/unanswered those without a scored completion, eval/unscored
    the unscored completions. If no completion is scored, these three are all. Otherwise the scored
    completions give eval/rewards/NAME/mean, eval/completions/mean_length (in tokens) and
    eval/completions/clipped_ratio, the share cut at the longest length. A reward that applies to none of
    them has no mean. avg@k, pass@k and maj@k follow, as in `_of_k`, with the completions that `judge`
    calls right; they are missing if it judges none.
    """
    given = [answer for answer in answers if answer.scored()]
    metrics: dict[str, float] = {
        "eval/questions": len(answers),
        "eval/unanswered": len(answers) - len(given),
        "eval/unscored": sum(len(one.completions) - len(one.scored()) for one in answers),
    }
    scored = [(answer, index) for answer in given for index in answer.scored()]
    rows = [answer.rewards[index] for answer, index in scored]
    for name in sorted({name for row in rows for name in row}):
        if values := [value for row in rows if (value := row.get(name)) is not None]:
            metrics[f"eval/rewards/{name}/mean"] = float(np.mean(values))
    if not given:
        return metrics
    lengths = [answer.lengths[index] for answer, index in scored]
    clipped = [answer.finish_reasons[index] == "length" for answer, index in scored]
    metrics["eval/completions/mean_length"] = float(np.mean(lengths))
    metrics["eval/completions/clipped_ratio"] = float(np.mean(clipped))
    return metrics | _of_k(given, [judge(answer, main_reward, right_from) for answer in given])


def _of_k(given: Sequence[Answer], judged: Sequence[Sequence[bool | None]]) -> dict[str, float]:
    """Return avg@k, pass@n for n of 1, 2, 4, ... and k, and maj@k, by names such as eval/avg@4.

    `judged` says of each completion of `given` whether it is right. Questions with None alone are left
    out; {} if all are. A scored completion with None is not right. k is the most completions of one.
    avg@k is the mean share of right ones. pass@n is of questions with n or more scored ones, if any.
    """
    known = [pair for pair in zip(given, judged, strict=True) if any(one is not None for one in pair[1])]
    if not known:
        return {}
    k = max(len(answer.completions) for answer, _ in known)
    right = [[bool(verdicts[index]) for index in answer.scored()] for answer, verdicts in known]
    found = {f"eval/avg@{k}": float(np.mean([np.mean(one) for one in right]))}
    for size in sorted({1 << power for power in range(k.bit_length())} | {k}):
        if chances := [pass_at_k(len(one), sum(one), size) for one in right if len(one) >= size]:
            found[f"eval/pass@{size}"] = float(np.mean(chances))
    if k > 1:  # one answer has no majority
        answers = [[one.answers[index] for index in one.scored()] for one, _ in known]
        found[f"eval/maj@{k}"] = float(np.mean(list(map(majority, answers, right))))
    return found
