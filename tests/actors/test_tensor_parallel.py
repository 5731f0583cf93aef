"""Real vLLM on the CPU with two ranks, each of which loads its part of a version in three files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.actors.live_engine import PROMPTS, SAMPLING, Live
from tests.actors.tiny_llama import greedy, load, teacher_forced, train_pair
from tests.helpers import needs_vllm, nightly

pytestmark = [pytest.mark.engine, needs_vllm, nightly]


def test_two_ranks_load_a_version_in_three_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the binding vLLM 0.32 wants a NUMA node for each rank.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    one, other = train_pair(tmp_path, ["float32"])["float32"]
    three = tmp_path / "three"
    shutil.copytree(other, three, ignore=shutil.ignore_patterns("*.safetensors"))
    load(other).save_pretrained(three, max_shard_size="500KB")
    live = Live(one, other, "float32", ranks=2)
    try:
        for folder, files in ((one, 1), (three, 3)):
            weights = live.next_weights(folder)
            assert len(weights.tensor_files) == files
            live.call(live.engine.take_weights(weights))
            scores = live.call(live.engine.score(f"score-{files}", PROMPTS[0]))
            pair = [(PROMPTS[0][:1], PROMPTS[0][1:])]
            right, wrong = (
                teacher_forced(load(path), pair, 1.0)[0] for path in _order(folder, one, three)
            )
            assert np.abs(scores - right).mean() < 1e-4 < np.abs(scores - wrong).mean()
            sampled = live.sample(PROMPTS, replace(SAMPLING, temperature=0.0), count=1)
            assert [group[0].token_ids.tolist() for group in sampled] == greedy(
                load(folder), PROMPTS, 40
            )
    finally:
        live.stop()


def _order(first: Path, *folders: Path) -> list[Path]:
    """The folders, this one first."""
    return sorted(folders, key=lambda folder: folder != first)
