"""Measure the learner's Updates: tokens per second, and model FLOPs utilisation (MFU).

    python -m benchmarks.gpu_mfu [0.5B] [1.5B] [tiny]

The shapes are those of Qwen2.5, with random weights; groups of eight completions of 1,792 tokens share a
prompt of 256. Each Update is whole: from sequences in main memory to the step of AdamW. Operations are
counted as in learner/policy/flops.py, recomputed ones once. The log has the time of each kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock.common.config.learner_settings import LearnerSettings
from penstock.learner.algorithm.batch import Batch, TrainSequence
from penstock.learner.policy.flops import peak_flops
from penstock.learner.policy.policy import Policy
from tests.tiny_tokenizer import save_tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 and its load: sequences of `prompt` + `completion` tokens in rows of `row` tokens."""

    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    row: int
    prompt: int = 256
    completion: int = 1792
    vocabulary: int = 151936


SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, groups=8, row=16384),
    "1.5B": Shape(1536, 8960, 28, 12, groups=4, row=8192),
    "tiny": Shape(32, 64, 2, 4, groups=2, row=512, prompt=8, completion=24, vocabulary=64),
}
GOALS = {"0.5B": 0.35, "1.5B": 0.45}
GENERATIONS, UPDATES = 8, 3


def make_batch(shape: Shape) -> Batch:
    """Random tokens in groups that share a prompt."""
    draw, sequences = np.random.default_rng(1), []
    for _ in range(shape.groups):
        prompt = draw.integers(3, shape.vocabulary, shape.prompt).astype("<i4")
        sequences += [
            TrainSequence(
                prompt, draw.integers(3, shape.vocabulary, shape.completion).astype("<i4"),
                np.full(shape.completion, -12.0, "<f4"), np.ones(shape.completion, bool),
                np.zeros(shape.completion, int), float(draw.normal()), 1.0,
            )
            for _ in range(GENERATIONS)
        ]  # fmt: skip
    return Batch(tuple(sequences))


def measure(shape: Shape, liger: bool) -> dict[str, Any]:
    """Median seconds of an Update after the first, the rate, the MFU, and the memory's peak."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=2,
        tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(device):  # random numbers for a billion weights take a minute on a CPU
            model = Qwen2ForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        save_tokenizer(Path(folder))
        del model
        settings = LearnerSettings(
            dtype="bfloat16", micro_batch_tokens=shape.row, num_generations=GENERATIONS,
            max_completion_length=shape.completion, use_liger_kernel=liger,
        )  # fmt: skip
        policy = Policy(Path(folder), settings, 100)
    batch, seconds, flops = make_batch(shape), [], 0.0
    try:
        for step in range(UPDATES + 1):
            began = time.monotonic()
            flops = policy.update(batch, step).flops
            seconds.append(time.monotonic() - began)
        print(kernels(policy, batch), file=sys.stderr, flush=True)
    finally:
        policy.close()
    update_s = statistics.median(seconds[1:])
    tokens = sum(sequence.length for sequence in batch.sequences)
    peak, gib = peak_flops(0.0), torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "update_s": update_s, "first_update_s": seconds[0], "tokens_per_s": tokens / update_s,
        "mfu": flops / update_s / peak if peak else None, "peak_gib": gib,
        "phases_s": {name: cost.seconds for name, cost in policy.phases.take_profile().items()},
    }  # fmt: skip


def kernels(policy: Policy, batch: Batch) -> str:
    """What the device, or the CPU, spends its time on in an Update of one group: a table."""
    gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        policy.update(Batch(batch.sequences[:GENERATIONS]), UPDATES + 1)
    key = "self_device_time_total" if gpu else "self_cpu_time_total"
    found = sorted(profile.key_averages(), key=lambda event: -getattr(event, key))[:25]
    rows = [f"{getattr(one, key) / 1000:10.2f} ms {one.count:6} x {one.key[:90]}" for one in found]
    return "\n".join(rows)


def main() -> int:
    """Measure; return 1 if a shape's best MFU misses its goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_mfu", description=__doc__)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    kernels = [False, True] if find_spec("liger_kernel") and torch.cuda.is_available() else [False]
    for name in options.shapes:
        for liger in kernels:
            title = f"{name}, liger" if liger else name
            try:
                results[title] = measure(SHAPES[name], liger)
            except Exception as error:  # the other shapes may fit
                results[title] = {"error": repr(error)[:500]}
            print(title, results[title], file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    print(json.dumps(results))
    best = {name: max(results[title].get("mfu") or 0.0 for title in results if title.startswith(name))
            for name in options.shapes}  # fmt: skip
    return int(any(best[name] < GOALS.get(name, 0.0) for name in best))


if __name__ == "__main__":
    sys.exit(main())
