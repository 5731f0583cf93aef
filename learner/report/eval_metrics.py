"""Metrics of an evaluation: avg@k, pass@k, maj@k. Pure.

A completion is right if its main reward is above 0: accuracy 1, correctness 1.5 or 2, acc 1.
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


def summarise(answers: Sequence[Answer], main_reward: str) -> dict[str, float]:
    """Return the metrics of an evaluation, by their names in metrics.jsonl, from an Answer per question.

    eval/questions counts the questions, eval/unanswered those without a scored completion, eval/unscored
    the unscored completions. If no completion is scored, these three are all. Otherwise the scored
    completions give eval/rewards/NAME/mean, eval/completions/mean_length (in tokens) and
    eval/completions/clipped_ratio, the share cut at the longest length. A reward that applies to none of
    them has no mean. avg@k, pass@k and maj@k follow, as in `_of_k`: a completion is right if the reward
    `main_reward` is above 0; they are missing if this reward applies to none.
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
    return metrics | _of_k(given, main_reward)


def _of_k(given: Sequence[Answer], main_reward: str) -> dict[str, float]:
    """Return avg@k, pass@n for n of 1, 2, 4, ... and k, and maj@k, by names such as eval/avg@4.

    A scored completion of `given` is right if its reward `main_reward` is above 0. Questions without
    this reward are left out; {} if all are. k is the most completions of one. avg@k is the mean share
    of right ones. pass@n is of questions with n or more scored ones, if any; no maj@k for k of 1.
    """
    judged = [one for one in given if any(row.get(main_reward) is not None for row in one.rewards)]
    if not judged:
        return {}
    k = max(len(answer.completions) for answer in judged)
    right = [[(one.rewards[i].get(main_reward) or 0.0) > 0 for i in one.scored()] for one in judged]
    found = {f"eval/avg@{k}": float(np.mean([np.mean(one) for one in right]))}
    for size in sorted({1 << power for power in range(k.bit_length())} | {k}):
        if chances := [pass_at_k(len(one), sum(one), size) for one in right if len(one) >= size]:
            found[f"eval/pass@{size}"] = float(np.mean(chances))
    if k > 1:
        answers = [[one.answers[index] for index in one.scored()] for one in judged]
        found[f"eval/maj@{k}"] = float(np.mean(list(map(majority, answers, right))))
    return found
