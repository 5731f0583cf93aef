"""What the actor advises when vLLM did not start."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from penstock.actors import engine_memory
from penstock.actors.engine_memory import memory_advice
from penstock.actors.vllm_engine import _advice
from penstock.common.config.settings import ActorSettings

GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "free", "total", "words"),
    [
        ({}, 30, 80, r"30\.0 of 80\.0 GiB .* asks for 72\.0: set it to 0\.33"),
        ({"gpu_memory_utilization": 0.3}, 30, 80, r"raise ACTOR_GPU_MEMORY_UTILIZATION \(now 0\.3\)"),
        ({}, 79, 80, r"lower ACTOR_MAX_MODEL_LEN \(now 768\) or ACTOR_MAX_NUM_SEQS \(now 256\)"),
    ],
)
def test_a_gpus_advice_has_a_value_where_there_is_one(settings, free, total, words):
    advice = memory_advice(ActorSettings(**settings), 768, (free * GIB, total * GIB))
    assert re.search(words, advice), advice


@pytest.mark.parametrize(("asked", "words"), [(4, "=4 asks for more: set it to 1.8"), (1, r"\(now 1\)")])
def test_a_cpus_advice_is_of_the_cache(asked, words, monkeypatch):
    free = type("Memory", (), {"available": 2 * GIB})
    monkeypatch.setattr(engine_memory.psutil, "virtual_memory", lambda: free)
    assert re.search(words, memory_advice(ActorSettings(kv_cache_gib=asked), 768, None))


def test_a_gpu_that_does_not_answer_hides_no_error(monkeypatch):
    """Without CUDA, the question how much memory is free fails as well."""
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert "the GPU does not answer either" in _advice(ActorSettings(), 768)
