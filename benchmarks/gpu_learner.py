"""Compare the learner on this machine's device with the same computation in float32 on its CPU.

    python -m benchmarks.gpu_learner [--tiny]

A random model scores and trains one batch of ragged sequences in each of many ways: packed with
variable-length attention and not packed, with liger-kernel's layers, ZeRO 0 to 3, offload, LoRA,
recomputed activations, and after its device was lent to actors. Compared are the log-probabilities and
the norm of the gradient. In bfloat16 the limit is twice the difference that bfloat16 makes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock.common.config.learner_settings import LearnerSettings
from penstock.learner.algorithm.batch import Batch, TrainSequence
from penstock.learner.policy.policy import Policy
from tests.tiny_tokenizer import save_tokenizer

FLOAT32, BFLOAT16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
LORA = {"lora_rank": 8}
REFERENCES: dict[str, dict[str, Any]] = {
    "float32": FLOAT32, "bfloat16": BFLOAT16, "LoRA": FLOAT32 | LORA, "LoRA bfloat16": BFLOAT16 | LORA,
}  # fmt: skip
"""Ways that are computed on the CPU too, not packed."""

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("float32", FLOAT32),
    "float32, not packed": ("float32", FLOAT32 | {"packing": False}),
    "float32, ZeRO 2": ("float32", FLOAT32 | {"zero_stage": "2"}),
    "bfloat16": ("bfloat16", BFLOAT16),
    "bfloat16, not packed": ("bfloat16", BFLOAT16 | {"packing": False}),
    "bfloat16, ZeRO 2": ("bfloat16", BFLOAT16 | {"zero_stage": "2"}),
    "bfloat16, ZeRO 3": ("bfloat16", BFLOAT16 | {"zero_stage": "3"}),
    "bfloat16, optimizer offloaded": (
        "bfloat16", BFLOAT16 | {"zero_stage": "2", "offload_optimizer": True}
    ),
    "bfloat16, all offloaded": (
        "bfloat16", BFLOAT16 | {"zero_stage": "3", "offload_optimizer": True, "offload_param": True}
    ),
    "bfloat16, recomputed activations": ("bfloat16", BFLOAT16 | {"gradient_checkpointing": True}),
    "bfloat16, reference model": ("bfloat16", BFLOAT16 | {"beta": 0.1}),
    "bfloat16, logits in float32": ("bfloat16", BFLOAT16 | {"cast_lm_head_to_fp32": True}),
    "LoRA": ("LoRA", FLOAT32 | LORA),
    "LoRA bfloat16": ("LoRA bfloat16", BFLOAT16 | LORA),
    "liger": ("bfloat16", BFLOAT16 | {"use_liger_kernel": True}),
}  # fmt: skip
"""By name: the way of REFERENCES to compare with, and the settings."""

EXACT = {"float32": 1e-4, "LoRA": 1e-4}
"""Largest mean difference of log-probabilities in float32; kernels add in other orders."""


def make_model(folder: Path, tiny: bool) -> None:
    """Write a random Qwen2 with grouped queries, whose log-probabilities differ from token to token."""
    torch.manual_seed(0)
    width, layers = (32, 2) if tiny else (256, 4)
    config = Qwen2Config(
        vocab_size=32 if tiny else 1024, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=width // 16 if tiny else 4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.05,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)


def make_batch(tiny: bool) -> Batch:
    """Ragged sequences of groups of four, which share a prompt."""
    draw, words = np.random.default_rng(1), 32 if tiny else 1024
    sequences = []
    for group in range(3):
        prompt = draw.integers(3, words, int(draw.integers(2, 16 if tiny else 100))).astype("<i4")
        for _ in range(4):
            length = int(draw.integers(1, 30 if tiny else 300))
            sequences.append(
                TrainSequence(
                    prompt, draw.integers(3, words, length).astype("<i4"),
                    np.full(length, -5.0, "<f4"), np.ones(length, bool), np.zeros(length, int),
                    float(draw.normal()) + 0.1 * group, 1.0,
                )
            )  # fmt: skip
    return Batch(tuple(sequences))


def compute(folder: Path, changes: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Log-probabilities, the norm of the gradient, and seconds, by the learner with these settings."""
    settings = LearnerSettings(**({"micro_batch_tokens": 4096, "num_generations": 4} | changes))
    began, batch = time.monotonic(), make_batch(tiny)
    policy = Policy(folder, settings, 10)
    try:
        logprobs = np.concatenate(policy.logprobs(batch.sequences))
        lent = policy._engine.stage < 3 and not settings.offload_optimizer
        if lent:
            policy.offload()
            held = torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
            policy.reload()
            assert np.array_equal(logprobs, np.concatenate(policy.logprobs(batch.sequences)))
        update = policy.update(batch, 0)
    finally:
        policy.close()
    found = {"logprobs": logprobs.tolist(), "grad_norm": update.grad_norm, "s": time.monotonic() - began}
    return found | ({"MiB while lent": held} if lent else {})


def references(folder: Path, tiny: bool) -> dict[str, Any]:
    """The ways of REFERENCES, computed on the CPU by a process that sees no GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu_learner", "--references", str(folder)]
    variables = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "4",
    }
    said = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])], env=variables, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def compare(way: str, found: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """How far a way is from its reference, and what is over the limit."""
    reference = WAYS[way][0]
    exact = known["LoRA" if reference.startswith("LoRA") else "float32"]

    def off(one: dict[str, Any]) -> float:
        return float(np.abs(np.array(one["logprobs"]) - np.array(exact["logprobs"])).mean())

    norm = abs(found["grad_norm"] / exact["grad_norm"] - 1)
    limit = EXACT.get(reference, 2 * off(known[reference]))
    norm_limit = 1e-3 if reference in EXACT else 0.05
    result = {key: value for key, value in found.items() if key != "logprobs"}
    result |= {"logprobs": off(found), "limit": limit, "gradient": norm, "gradient limit": norm_limit}
    return result | {"right": off(found) <= limit and norm <= norm_limit}


def main() -> int:
    """Compare all ways; return 1 if one is over a limit or fails."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_learner", description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--references", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.references:
        made = {
            name: compute(options.references, changes | {"packing": False}, options.tiny)
            for name, changes in REFERENCES.items()
        }
        print(json.dumps(made))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.tiny)
        known = references(Path(folder), options.tiny)
        results: dict[str, dict[str, Any]] = {}
        for way, (_, changes) in WAYS.items():
            if "use_liger_kernel" in changes and not (
                find_spec("liger_kernel") and torch.cuda.is_available()
            ):
                continue
            try:
                results[way] = compare(way, compute(Path(folder), changes, options.tiny), known)
            except Exception as error:  # one way that fails does not hide the others
                results[way] = {"right": False, "error": repr(error)[:500]}
            print(way, results[way], file=sys.stderr, flush=True)
    print(json.dumps(results))
    return int(not all(result["right"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
