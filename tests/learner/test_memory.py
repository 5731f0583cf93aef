"""An Update that runs out of memory ends with what to change, and a resume with it goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.common.errors import ConfigError
from penstock.learner.algorithm.batch import TrainSequence
from penstock.learner.policy.memory import explaining_lack_of_memory
from penstock.learner.policy.policy import Policy
from tests.learner.builders import make_settings
from tests.learner.gradients import make_batch

CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


def sequence(prompt: int, length: int) -> TrainSequence:
    ids = np.full(length, 5, dtype=np.int32)
    return TrainSequence(np.full(prompt, prompt, np.int32), ids, *[ids.astype(float)] * 3, 0.0, 1.0)


def raised(error: Exception, sequences: list[TrainSequence], **settings: object) -> str:
    with (
        pytest.raises(ConfigError) as found,
        explaining_lack_of_memory(sequences, make_settings(**settings)),
    ):
        raise error
    return str(found.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), CPU])
def test_rows_are_halved_but_not_below_the_longest_sequence(error: Exception) -> None:
    four = [sequence(1 + n, 9) for n in range(4)]
    said = raised(error, four, micro_batch_tokens=100)
    assert "a row has up to 46 tokens. Set LEARNER_MICRO_BATCH_TOKENS=23, then start again" in said
    assert "LEARNER_GRADIENT_CHECKPOINTING=true" in said
    said = raised(error, [*four, sequence(7, 33)], micro_batch_tokens=60)
    assert "Set LEARNER_MICRO_BATCH_TOKENS=40" in said


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 8}, {"packing": False}])
def test_a_single_sequence_needs_another_remedy(settings: dict[str, object]) -> None:
    said = raised(MemoryError(), [sequence(2, 9), sequence(3, 4)], **settings)
    assert "one sequence of 11 tokens is too much. Set LEARNER_GRADIENT_CHECKPOINTING=true" in said
    assert "LEARNER_MICRO_BATCH_TOKENS" not in said
    settings |= {"gradient_checkpointing": True, "logprob_chunk": 16}
    assert "GRADIENT_CHECKPOINTING" not in raised(MemoryError(), [sequence(2, 9)], **settings)


def test_other_errors_pass() -> None:
    with (
        pytest.raises(RuntimeError, match="another cause"),
        explaining_lack_of_memory([sequence(1, 1)], make_settings()),
    ):
        raise RuntimeError("another cause")


def test_an_update_that_runs_out_of_memory_names_the_setting(model_folder, monkeypatch) -> None:
    policy = Policy(model_folder, make_settings(micro_batch_tokens=10_000), steps=1)

    def lack(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy._engine, "accumulate", lack)
    with pytest.raises(ConfigError, match=r"ran out of memory: .* LEARNER_MICRO_BATCH_TOKENS="):
        policy.update(make_batch(), 0)
