"""What packing and chunked log-probabilities save in the learner's forward and backward pass.

    python -m benchmarks.learner [--rounds 5] [--json]

benchmarks/README.md says what is compared and how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.learner.algorithm.batch import TrainSequence
from penstock.learner.policy.attention import NAME, use_packed_attention
from penstock.learner.policy.logprobs import LogprobHead, make_logprob_head, token_logprobs
from penstock.learner.policy.packing import Row, build_row, pack_rows

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Load:
    """The work: a Llama shape, and sequences of long-tailed lengths."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    intermediate: int = 688
    vocabulary: int = 151_936
    sequences: int = 64
    median: float = 136.0
    """Of the lognormal lengths, in tokens of prompt and completion."""
    sigma: float = 1.0
    shortest: int = 16
    longest: int = 1024
    completion_share: float = 0.125
    """Of a sequence's tokens; the rest is its prompt."""
    micro_batch: int = 8
    chunk: int = 128
    memory_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Padded:
    """A padded micro-batch: prompts to the left, completions to the right of one border."""

    input_ids: Tensor
    """(B, longest prompt + longest completion)."""
    attention_mask: Tensor
    targets: Tensor
    """(B, W), W the longest completion."""
    weights: Tensor
    """(B, W): the loss is the weighted sum of log-probabilities; 0 at padding."""


def make_sequences(load: Load) -> list[TrainSequence]:
    """Random tokens; equal loads give equal sequences."""
    random = np.random.default_rng(load.seed)
    lengths = random.lognormal(np.log(load.median), load.sigma, load.sequences)
    return [
        _make_sequence(int(length), load, random) for length in lengths.clip(load.shortest, load.longest)
    ]


def _make_sequence(length: int, load: Load, random: np.random.Generator) -> TrainSequence:
    completion = max(1, round(length * load.completion_share))
    return TrainSequence(
        prompt_ids=random.integers(1, load.vocabulary, length - completion),
        token_ids=random.integers(1, load.vocabulary, completion),
        behaviour=np.zeros(completion, np.float32),
        mask=np.ones(completion, bool),
        staleness=np.zeros(completion, np.int64),
        advantage=float(random.normal()),
        temperature=1.0,
    )


def make_model(load: Load) -> Any:
    """Random weights, fp32."""
    torch.manual_seed(load.seed)
    config = LlamaConfig(
        vocab_size=load.vocabulary,
        hidden_size=load.width,
        intermediate_size=load.intermediate,
        num_hidden_layers=load.layers,
        num_attention_heads=load.heads,
        max_position_embeddings=load.longest,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def pad(sequences: Sequence[TrainSequence]) -> Padded:
    """As trainers that pad do it."""
    left = max(len(item.prompt_ids) for item in sequences)
    right = max(len(item.token_ids) for item in sequences)
    ids = np.zeros((len(sequences), left + right), np.int64)
    mask, weights = np.zeros_like(ids), np.zeros((len(sequences), right), np.float32)
    for row, item in enumerate(sequences):
        prompt, completion = len(item.prompt_ids), len(item.token_ids)
        ids[row, left - prompt : left] = item.prompt_ids
        ids[row, left : left + completion] = item.token_ids
        mask[row, left - prompt : left + completion] = 1
        weights[row, :completion] = item.advantage
    tensors = [torch.from_numpy(array) for array in (ids, mask, ids[:, left:].copy(), weights)]
    return Padded(*tensors)


def padded_hidden(model: Any, batch: Padded) -> Tensor:
    """Hidden states that predict the completion positions, (B, W, D)."""
    hidden = model.base_model(batch.input_ids, batch.attention_mask, use_cache=False).last_hidden_state
    return hidden[:, -batch.targets.shape[1] - 1 : -1]


def padded_dense(model: Any, batch: Padded) -> Tensor:
    """Log-probabilities (B, W) by way of all logits."""
    logprobs = torch.log_softmax(model.lm_head(padded_hidden(model, batch)).float(), dim=-1)
    return logprobs.gather(-1, batch.targets[..., None]).squeeze(-1)


def padded_chunked(model: Any, head: LogprobHead, batch: Padded) -> Tensor:
    """The same in chunks."""
    hidden = padded_hidden(model, batch).flatten(0, 1)
    logprobs, _ = head(hidden, batch.targets.flatten(), torch.ones(len(hidden)))
    return logprobs.view(batch.targets.shape)


def packed_chunked(model: Any, head: LogprobHead, row: Row) -> Tensor:
    """Log-probabilities (N,) of a packed row."""
    hidden = model.base_model(**row.model_inputs).last_hidden_state[0, row.predict_N.index]
    logprobs, _ = head(hidden, row.token_ids_N, row.temperature_N)
    return logprobs


class Comparison:
    """The three ways, over the same sequences; each can be cut to its first `most` passes."""

    def __init__(self, load: Load) -> None:
        sequences = make_sequences(load)
        lengths = [item.length for item in sequences]
        self.padded = [
            pad(sequences[start : start + load.micro_batch])
            for start in range(0, len(sequences), load.micro_batch)
        ]
        self.padded_positions = sum(batch.input_ids.numel() for batch in self.padded)
        self.packed_positions = sum(lengths)
        self.budget = max(*lengths, self.padded_positions // len(self.padded))
        self.rows = [
            build_row([sequences[index] for index in row], CPU)
            for row in pack_rows(lengths, self.budget)
        ]
        self._model = make_model(load)
        self._head = make_logprob_head(self._model, load.chunk, fp32=False)

    @property
    def bound(self) -> float:
        """The speed-up if time went by positions alone."""
        return self.padded_positions / self.packed_positions

    def padded_dense(self, most: int | None = None) -> None:
        """Padded micro-batches, all logits at once."""
        self._train(
            "sdpa",
            self.padded[:most],
            lambda batch: (padded_dense(self._model, batch) * batch.weights).sum(),
        )

    def padded_chunked(self, most: int | None = None) -> None:
        """Padded micro-batches, logits in chunks."""
        self._train(
            "sdpa",
            self.padded[:most],
            lambda batch: (padded_chunked(self._model, self._head, batch) * batch.weights).sum(),
        )

    def packed_chunked(self, most: int | None = None) -> None:
        """Packed rows, logits in chunks."""
        self._train(
            NAME,
            self.rows[:most],
            lambda row: (packed_chunked(self._model, self._head, row) * row.advantages_N).sum(),
        )

    def gradient(self) -> Tensor:
        """Of the output weight, after one of the above."""
        gradient = self._head.weight.grad
        assert gradient is not None
        return gradient

    def _train(self, attention: str, pieces: Sequence[Any], loss: Callable[[Any], Tensor]) -> None:
        if attention == NAME:
            use_packed_attention(self._model)
        else:
            self._model.set_attn_implementation(attention)
        self._model.zero_grad()
        for piece in pieces:
            loss(piece).backward()


def measure_speed(load: Load, rounds: int) -> dict[str, Any]:
    """Seconds per way and round, the ways in turn; and what follows from them, round by round."""
    comparison = Comparison(load)
    ways = (comparison.padded_dense, comparison.padded_chunked, comparison.packed_chunked)
    seconds: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for way in ways:
        way(most=1)  # the first pass of a process allocates and plans
    for number in range(1, rounds + 1):
        for way in ways:
            start = time.perf_counter()
            way()
            took = time.perf_counter() - start
            seconds[way.__name__].append(took)
            print(f"round {number}/{rounds}: {way.__name__} {took:.1f} s", file=sys.stderr, flush=True)
    packing = _ratios(seconds["padded_chunked"], seconds["packed_chunked"])
    return {
        "positions_padded": comparison.padded_positions,
        "positions_packed": comparison.packed_positions,
        "micro_batches": len(comparison.padded),
        "rows": len(comparison.rows),
        "row_budget": comparison.budget,
        "seconds": {name: _summary(values) for name, values in seconds.items()},
        "bound": comparison.bound,
        "speedup_of_packing": _summary(packing),
        "share_of_bound": _summary([ratio / comparison.bound for ratio in packing]),
        "speedup_of_both": _summary(_ratios(seconds["padded_dense"], seconds["packed_chunked"])),
    }


def _ratios(above: list[float], below: list[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_memory(load: Load) -> dict[str, Any]:
    """Extra peak memory of the log-probability part, in bytes, each in a process of its own."""
    dense, chunked = (_probe_apart(load, way) for way in ("dense", "chunked"))
    return {
        "tokens": load.memory_tokens,
        "chunk": load.chunk,
        "dense_bytes": dense,
        "chunked_bytes": chunked,
        "chunked_of_dense": chunked / dense,
    }


def _probe_apart(load: Load, way: str) -> int:
    command = [sys.executable, "-m", "benchmarks.learner", "--probe", way, json.dumps(asdict(load))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(f"memory: {way} {int(output) / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    return int(output)


def probe(load: Load, way: str) -> int:
    """Bytes by which the peak of one forward and backward pass exceeds what was there before.

    There before are the weight, the hidden states and both gradients, all written to.
    """
    torch.manual_seed(load.seed)
    hidden = torch.randn(load.memory_tokens, load.width, requires_grad=True)
    weight = torch.randn(load.vocabulary, load.width, requires_grad=True)
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    ids = torch.randint(load.vocabulary, (load.memory_tokens,))
    before = _memory("VmRSS")
    if way == "dense":
        logprobs = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids[:, None])
    else:
        ones = torch.ones(load.memory_tokens)
        logprobs, _ = token_logprobs(hidden, weight, ids, ones, chunk=load.chunk, fp32=False)
    logprobs.sum().backward()
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    """Bytes by /proc/self/status: VmRSS, in memory now, or VmHWM, the peak (Linux).

    Not ru_maxrss: that begins at the peak of the process which started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(found.split()[1]) * 1024


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    speed, memory = result["speed"], result["memory"]

    def line(name: str, values: dict[str, float], unit: str) -> str:
        median, low, high = values["median"], values["min"], values["max"]
        return f"{name:32}{median:8.2f}{unit}  ({low:.2f} to {high:.2f})"

    return "\n".join(
        [
            *(line(name, values, " s") for name, values in speed["seconds"].items()),
            f"{'bound (positions)':32}{speed['bound']:8.2f}x",
            line("speed-up of packing", speed["speedup_of_packing"], "x"),
            line("its share of the bound", speed["share_of_bound"], " "),
            line("packed against padded, dense", speed["speedup_of_both"], "x"),
            f"{'extra memory, dense logits':32}{memory['dense_bytes'] / 2**20:8.0f} MiB",
            f"{'extra memory, chunked':32}{memory['chunked_bytes'] / 2**20:8.0f} MiB",
        ]
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="passes over the sequences per way")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--probe", nargs=2, metavar=("WAY", "LOAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        way, load = options.probe
        print(probe(Load(**json.loads(load)), way))
        return
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    load = Load()
    result = {
        "load": asdict(load),
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "memory": measure_memory(load),
        "speed": measure_speed(load, options.rounds),
    }
    print(json.dumps(result, indent=1) if options.json else table(result))


if __name__ == "__main__":
    main()
