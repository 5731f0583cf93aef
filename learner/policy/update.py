"""What an Update did, and what its metrics are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Per trained token of an Update's optimizer steps, (N,)."""

    logprobs: np.ndarray
    behaviour: np.ndarray
    ratio: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    clipped_low: np.ndarray
    clipped_high: np.ndarray
    bounded: np.ndarray
    staleness: np.ndarray
    oldest: np.ndarray
    """The staleness of its completion's oldest token."""
    first: np.ndarray
    """Whether it was computed before any of the Update's optimizer steps."""

    @classmethod
    def join(cls, records: Sequence["TokenRecord"]) -> "TokenRecord":
        """One after the other."""
        return cls(
            *(
                np.concatenate([np.zeros(0), *(getattr(record, field.name) for record in records)])
                for field in fields(cls)
            )
        )


@dataclass(frozen=True, slots=True)
class Update:
    """All optimizer steps on one batch.

    `skipped` of them changed nothing because the gradients were not finite; loss and norm are means
    over the others, None if there are none.
    """

    loss: float | None
    grad_norm: float | None
    learning_rate: float
    optimizer_steps: int
    skipped: int
    flops: float
    tokens: TokenRecord
