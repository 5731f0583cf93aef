"""What an evaluation says: avg@k, pass@k, maj@k. Pure.

A completion counts as right when the main reward is above 0: accuracy 1, correctness 1.5 or 2, acc 1.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from learner.evaluation import Answer

_CLEAN = re.compile(r"[\s$,]|\\[ ,!;]")


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that of k of n completions, `right` of which are right, at least one is.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), eq. 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> bool:
    """Whether the most frequent answer is right; of equally frequent ones the first counts.

    Answers are compared as text, without white space, dollars and thousands separators. An empty answer
    is no vote.

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
    """The metrics of an evaluation, by name; of rewards that apply to no answer there is none.

    Questions whose ticket died count as wrong, and in eval/unanswered.
    """
    given = [answer for answer in answers if answer.completions]
    metrics: dict[str, float] = {
        "eval/questions": len(answers),
        "eval/unanswered": len(answers) - len(given),
    }
    for name in sorted({name for answer in given for row in answer.rewards for name in row}):
        found = [row[name] for answer in given for row in answer.rewards]
        values = [value for value in found if value is not None]
        if values:
            metrics[f"eval/rewards/{name}/mean"] = float(np.mean(values))
    if not given:
        return metrics
    metrics["eval/completions/mean_length"] = float(
        np.mean([n for answer in given for n in answer.lengths])
    )
    metrics["eval/completions/clipped_ratio"] = float(
        np.mean([reason == "length" for answer in given for reason in answer.finish_reasons])
    )
    return metrics | _of_k(answers, given, main_reward)


def _of_k(answers: Sequence[Answer], given: Sequence[Answer], main_reward: str) -> dict[str, float]:
    """avg@k, pass@1, 2, 4, ..., k and maj@k over all questions that have a gold answer."""
    k = max(len(answer.completions) for answer in given)
    judged = [
        answer
        for answer in answers
        if not answer.completions or any(row.get(main_reward) is not None for row in answer.rewards)
    ]
    if not judged:
        return {}
    right = [
        [(row.get(main_reward) or 0.0) > 0 for row in answer.rewards] or [False] * k for answer in judged
    ]
    found = {f"eval/avg@{k}": float(np.mean([np.mean(one) for one in right]))}
    size = 1
    while size <= k:
        found[f"eval/pass@{size}"] = float(
            np.mean([pass_at_k(len(one), sum(one), size) for one in right])
        )
        size = k if size < k < 2 * size else 2 * size
    if k > 1:
        votes = [majority(one.answers, fine) for one, fine in zip(judged, right, strict=True)]
        found[f"eval/maj@{k}"] = float(np.mean(votes))
    return found
