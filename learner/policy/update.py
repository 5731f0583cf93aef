"""The result of an Update, with the values that its metrics are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Values of the trained tokens of an Update's optimizer steps, each field (N,)."""

    logprobs: np.ndarray
    behaviour: np.ndarray
    ratio: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    clipped_low: np.ndarray
    clipped_high: np.ndarray
    bounded: np.ndarray
    staleness: np.ndarray
    oldest: np.ndarray  # largest staleness of a token in the same completion
    first: np.ndarray  # whether the values were computed before the Update's first optimizer step

    @classmethod
    def join(cls, records: Sequence["TokenRecord"]) -> "TokenRecord":
        """Return one record of all records' tokens, in order, as float64; empty arrays for none."""
        columns = ([getattr(record, field.name) for record in records] for field in fields(cls))
        return cls(*(np.concatenate([np.zeros(0), *column]) for column in columns))


@dataclass(frozen=True, slots=True)
class Update:
    """The result of all optimizer steps on one batch."""

    loss: float | None  # mean over the steps that were not skipped, None if all were
    grad_norm: float | None  # mean over the same steps
    learning_rate: float
    optimizer_steps: int
    skipped: int  # optimizer steps that changed no weight because the gradients were not finite
    flops: float
    tokens: TokenRecord
    entropy_coef: float | None = None  # after the last optimizer step; None unless it is adapted
