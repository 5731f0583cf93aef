"""A task with long answers for benchmarks/time_to_reward.py: count down from a number.

The prompt `20 :` has the answer `20 19 18 .. 1`, of as many tokens as the number says. Numbers are drawn
lognormal (median 20, sigma 1) and capped at 250, so that a few answers of a batch are ten times as long
as most. The base model has learned from answers of which a token in twenty leaves a number out, so that
it seldom counts down from a large number without a fault. Accuracy is the probability of the right
answer at temperature 1, which needs no sampling.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.deploy.demo.base_model import train_batch
from penstock.deploy.demo.task import Problem
from penstock.deploy.demo.tiny_llama import save_checkpoint

LARGEST, MEDIAN, SIGMA = 250, 20, 1.0
TRAINING, HELDOUT = 4000, 600
FAULTS, BASE_ACCURACY = 0.05, 0.28
"""The share of faults in the answers that the base model learns from, and the accuracy it stops at."""
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_BATCH_TOKENS, _DRAWN, _RATE, _MOST_STEPS = 4096, 1024, 1e-3, 2000
_IGNORED = -100


def draw_problems(count: int, seed: int | str) -> list[Problem]:
    """Questions with their answers."""
    draw = random.Random(seed)
    numbers = [round(draw.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(count)]
    capped = [min(max(number, 1), LARGEST) for number in numbers]
    return [Problem(f"{one} :", " ".join(map(str, range(one, 0, -1)))) for one in capped]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per number."""
    tokens = [*_SPECIAL.values(), ":", *map(str, range(1, LARGEST + 1))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **_SPECIAL)


def encode(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids (N, T) padded on the right, and labels of the same shape: those of answers and ends."""
    rows = [
        [*tokenizer.encode(f"{one.question} {one.answer}"), tokenizer.eos_token_id] for one in problems
    ]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [_IGNORED] * (width - len(row)) for row in rows])
    labels[:, :2] = _IGNORED  # the number and the colon
    return ids, labels


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, problems: list[Problem], tokenizer: PreTrainedTokenizerFast
) -> float:
    """The mean probability of the answers at temperature 1."""
    found = []
    for part in batches(problems):
        ids, labels = encode(part, tokenizer)
        logprobs = -cross_entropy(
            model(input_ids=ids[:, :-1]).logits.transpose(1, 2), labels[:, 1:], ignore_index=_IGNORED,
            reduction="none",
        )  # fmt: skip
        found += logprobs.sum(dim=1).exp().tolist()
    return sum(found) / len(found)


def batches(problems: list[Problem]) -> list[list[Problem]]:
    """The problems by length, in parts of up to _BATCH_TOKENS tokens when padded."""
    parts: list[list[Problem]] = []
    for one in sorted(problems, key=lambda one: one.answer.count(" ")):
        if not parts or (len(parts[-1]) + 1) * (one.answer.count(" ") + 4) > _BATCH_TOKENS:
            parts.append([])
        parts[-1].append(one)
    return parts


def with_faults(problem: Problem, draw: random.Random) -> Problem:
    """The problem with an answer that leaves numbers out."""
    kept = [word for word in problem.answer.split() if draw.random() >= FAULTS]
    return Problem(problem.question, " ".join(kept or ["1"]))


def write_task(folder: Path, seed: int) -> tuple[Path, Path, Path]:
    """Write questions and a base model; return model folder, training and held-out questions."""
    folder.mkdir(parents=True)
    train, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, count, own in ((train, TRAINING, f"train {seed}"), (heldout, HELDOUT, f"heldout {seed}")):
        rows = [{"question": one.question, "answer": one.answer} for one in draw_problems(count, own)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_base_model(folder / "model", seed)
    return folder / "model", train, heldout


def make_base_model(folder: Path, seed: int) -> None:
    """Train a model on faulty answers to BASE_ACCURACY. Raise RuntimeError if it is not reached."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=4, head_dim=32, max_position_embeddings=LARGEST + 22,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    aside, draw, step = draw_problems(300, f"aside {seed}"), random.Random(seed), 0
    while step < _MOST_STEPS:
        drawn = [with_faults(one, draw) for one in draw_problems(_DRAWN, draw.getrandbits(32))]
        parts = batches(drawn)
        for part in draw.sample(parts, len(parts)):
            train_batch(model, optimizer, *encode(part, tokenizer))
            step += 1
        if accuracy(model, aside, tokenizer) >= BASE_ACCURACY:
            return save_checkpoint(model, tokenizer, folder)
    raise RuntimeError(f"the base model has not reached {BASE_ACCURACY:.0%} in {_MOST_STEPS} steps")
