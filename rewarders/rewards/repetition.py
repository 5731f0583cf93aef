"""The reward `repetition`: a penalty for repeated words."""

from typing import Any


def repetition(
    prompts: list[Any],
    completions: list[str],
    repetition_n_grams: int = 3,
    repetition_max_penalty: float = -1.0,
    **columns: Any,
) -> list[float]:
    """Return (1 - distinct / all word n-grams) * repetition_max_penalty; 0 for fewer than n words.

    Words are separated by white space and compared in lower case. Source: arXiv:2502.03373.

    Example:
        >>> repetition(["", ""], ["a b c d", "a a a a a"])
        [0.0, -0.6666666666666667]
    """
    shares = [share_repeated(completion, repetition_n_grams) for completion in completions]
    return [share * repetition_max_penalty if share else 0.0 for share in shares]  # no -0.0


def share_repeated(text: str, n: int) -> float:
    """Return the share of a text's word n-grams that occurred before; 0.0 for fewer than n words."""
    words = text.lower().split()
    ngrams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
