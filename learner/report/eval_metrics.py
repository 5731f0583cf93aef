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
    """Return the probability that at least one of k completions, drawn from n, is right.

    `right` of the n completions are right.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), eq. 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> bool:
    """Return whether the most frequent answer is right. Among equally frequent answers the first wins.

    Answers are compared as text, without white space, dollars and thousands separators. Empty answers do
    not count; without any other the result is False.

    Example:
        >>> majority(["72", " 72", "71"], [True, True, False])
        True
    """
    votes = Counter(clean for answer in answers if (clean := _CLEAN.sub("", answer)))
    if not votes:
        return False
    (winner, _), *_ = votes.most_common(1)
    first = next(place for place, answer in enumerate(answers) if _CLEAN.sub("", answer) == winner)
    return right[first]


def summarise(answers: Sequence[Answer], main_reward: str) -> dict[str, float]:
    """Return the metrics of an evaluation by name. A reward that applies to no answer has no metric.

    Questions whose ticket died count in eval/unanswered alone, and completions that could not be scored
    in eval/unscored alone.
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
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values:
            metrics[f"eval/rewards/{name}/mean"] = float(np.mean(values))
    if not given:
        return metrics
    lengths = [answer.lengths[index] for answer, index in scored]
    clipped = [answer.finish_reasons[index] == "length" for answer, index in scored]
    metrics["eval/completions/mean_length"] = float(np.mean(lengths))
    metrics["eval/completions/clipped_ratio"] = float(np.mean(clipped))
    return metrics | _of_k(given, main_reward)


def _of_k(given: Sequence[Answer], main_reward: str) -> dict[str, float]:
    """Return avg@k, pass@1, pass@2, pass@4, ..., pass@k and maj@k over the questions with a gold answer.

    pass@n is over the questions with at least n scored completions.
    """
    judged = [one for one in given if any(row.get(main_reward) is not None for row in one.rewards)]
    if not judged:
        return {}
    k = max(len(answer.completions) for answer in judged)
    right = [
        [(one.rewards[index].get(main_reward) or 0.0) > 0 for index in one.scored()] for one in judged
    ]
    found = {f"eval/avg@{k}": float(np.mean([np.mean(one) for one in right]))}
    size = 1
    while size <= k:
        chances = [pass_at_k(len(one), sum(one), size) for one in right if len(one) >= size]
        if chances:
            found[f"eval/pass@{size}"] = float(np.mean(chances))
        size = k if size < k < 2 * size else 2 * size
    if k > 1:
        votes = [
            majority([one.answers[index] for index in one.scored()], fine)
            for one, fine in zip(judged, right, strict=True)
        ]
        found[f"eval/maj@{k}"] = float(np.mean(votes))
    return found
