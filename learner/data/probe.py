"""The texts by which an actor finds out whether its engine has loaded the weights as they are."""

from collections.abc import Iterable

import numpy as np

POSITIONS = 256
"""Log-probabilities of a probe in all."""
_LONGEST = 129


def probe_texts(prompts: Iterable[np.ndarray], tokens_per_sequence: int) -> tuple[np.ndarray, ...]:
    """Return texts (L,) of together 257 token ids or more, where the prompts have so many tokens.

    The prompts, each of any length (P,), are joined and cut, because those of a task may be short. A
    text has at most 129 tokens, and leaves an engine room for one more of `tokens_per_sequence`. Fewer
    than 2 tokens are no text. Example: prompts of 3 and 4 tokens give a text of 7.
    """
    longest = min(_LONGEST, tokens_per_sequence - 1)
    joined = np.concatenate([np.zeros(0, "<i4"), *prompts]).astype("<i4")
    texts, found = [], 0
    for start in range(0, len(joined) - 1, max(longest, 1)):
        text = joined[start : start + longest]
        if len(text) < 2 or found >= POSITIONS:
            break
        texts.append(text)
        found += len(text) - 1
    return tuple(texts)
