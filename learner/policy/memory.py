"""What to change when an Update runs out of memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.learner.algorithm.batch import TrainSequence
from penstock.learner.policy.packing import rows_of_ranks

_ON_THE_CPU = "DefaultCPUAllocator"
"""In the text of the RuntimeError that torch raises when a CPU's memory is not enough."""


@contextmanager
def explaining_lack_of_memory(
    sequences: Sequence[TrainSequence], settings: LearnerSettings
) -> Iterator[None]:
    """Raise ConfigError if the block, which trains on `sequences`, runs out of memory.

    The error names the setting to change and, where smaller rows help, the value to use. A restart alone
    would run out of memory again. The journal has the batch: a resume with other settings trains it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and _ON_THE_CPU not in str(error):
            raise
        raise ConfigError(f"the Update ran out of memory: {_remedy(sequences, settings)}") from error


def _remedy(sequences: Sequence[TrainSequence], settings: LearnerSettings) -> str:
    """Return what was found about the largest row, and what to set before the learner is started again.

    Example: rows of up to 16,000 tokens whose longest sequence has 2,000: 8,000 tokens per row.
    """
    budget = settings.micro_batch_tokens if settings.packing else 1
    (rows,) = rows_of_ranks(sequences, budget, ranks=1)
    largest = max(sum(sequences[index].length for index in row) for row in rows)
    longest = max(sequence.length for sequence in sequences)
    others = [
        "" if settings.gradient_checkpointing else "LEARNER_GRADIENT_CHECKPOINTING=true",
        "" if settings.logprob_chunk <= 32 else "LEARNER_LOGPROB_CHUNK=32",
        "a smaller LEARNER_MAX_COMPLETION_LENGTH" if largest <= longest else "",
        "LEARNER_ZERO_STAGE or LEARNER_OFFLOAD_OPTIMIZER (docs/training.md)",
    ]
    also = ", ".join(filter(None, others))
    if largest <= longest:
        return f"one sequence of {longest} tokens is too much. Set {also}, then start again to resume"
    smaller = max(longest, largest // 2)
    return (
        f"a row has up to {largest} tokens. Set LEARNER_MICRO_BATCH_TOKENS={smaller}, then start again "
        f"to resume; it may also help to set {also}"
    )
