"""The texts by which an actor finds out whether its engine has loaded the weights as they are."""

from collections.abc import Iterable

import numpy as np

POSITIONS = 256
"""Log-probabilities of a probe in all."""
_LONGEST = 129


def probe_texts(prompts: Iterable[np.ndarray], tokens_per_sequence: int) -> tuple[np.ndarray, ...]:
    """Return texts (L,) with together 256 token ids or more after the first one of each.

    The prompts, each of any length (P,), are joined, repeated and cut, because those of a task may be
    few and short. A text has at most 129 tokens, and leaves an engine room for one more of
    `tokens_per_sequence`. Prompts without tokens give no text, and so does room for under 2.
    """
    longest = min(_LONGEST, tokens_per_sequence - 1)
    joined = np.concatenate([np.zeros(0, "<i4"), *prompts]).astype("<i4")
    if not len(joined) or longest < 2:
        return ()
    count = -(-POSITIONS // (longest - 1))
    return tuple(np.resize(joined, (count, longest)))
