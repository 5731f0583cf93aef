"""The demo's base model: a tiny Llama that has half learned the task.

Pre-training stops on the steep part of its learning curve, where the skill is there but the model
is not sure of it: that is what reinforcement learning can build on. The criterion is an accuracy
measured on a validation slice of the pre-training pairs, so the held-out questions stay unseen and
the speed of the machine changes nothing. The learning rate is still high at that point, hence the
accuracy swings by several points within a few steps: it is measured often, and has to lie in a band
and not merely above a threshold.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.common.errors import PenstockError
from penstock.deploy.demo.task import Problem, TaskFiles, operand_pair, read_problems
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint

LOWEST_ACCURACY = 0.36
HIGHEST_ACCURACY = 0.44
VALIDATION_PAIRS = 250
BATCH_SIZE = 256
LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
MAX_STEPS = 1200
STEPS_PER_MEASURE = 3
STEPS_PER_REPORT = 30

_IGNORED = -100


class BaseModelError(PenstockError):
    """Pre-training ended without reaching the accuracy that the demo starts from."""


@dataclass(frozen=True)
class BaseModelReport:
    """Result of pre-training; the accuracy is the share of questions answered right greedily."""

    parameters: int
    steps: int
    heldout_accuracy: float


@dataclass(frozen=True)
class _Examples:
    """Token ids (N, T), padded; labels (N, T) are the same ids, with all but answer and eos ignored."""

    input_ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return the number N of examples."""
        return len(self.input_ids)

    def __getitem__(self, rows: Tensor) -> "_Examples":
        """Return the examples of these row numbers (B,)."""
        return _Examples(self.input_ids[rows], self.labels[rows])


def make_base_model(
    folder: Path, task: TaskFiles, seed: int, report: Callable[[str], None]
) -> BaseModelReport:
    """Pre-train the base model on `task.pretrain` and save it as a Hugging Face checkpoint.

    Takes about 70 seconds of one core, and limits torch to one thread in this process: on a busy machine
    the threads of so small a model wait for each other. The same seed makes the same model on the same
    machine. `report` receives a line of progress every STEPS_PER_REPORT steps. Raise BaseModelError when
    no measured accuracy within MAX_STEPS is between LOWEST_ACCURACY and HIGHEST_ACCURACY.
    """
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    train, validation = _split_by_pair(read_problems(task.pretrain), seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(tokenizer)
        steps = _pretrain(model, _encode(train, tokenizer), _encode(validation, tokenizer), report)
    save_checkpoint(model, tokenizer, folder)
    return BaseModelReport(
        parameters=model.num_parameters(),
        steps=steps,
        heldout_accuracy=_measure_accuracy(model, _encode(read_problems(task.heldout), tokenizer)),
    )


def _split_by_pair(problems: Sequence[Problem], seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on, and those of VALIDATION_PAIRS operand pairs to validate with."""
    pairs = sorted({operand_pair(problem.question) for problem in problems})
    validation_pairs = set(random.Random(seed).sample(pairs, VALIDATION_PAIRS))
    train: list[Problem] = []
    validation: list[Problem] = []
    for problem in problems:
        aside = operand_pair(problem.question) in validation_pairs
        (validation if aside else train).append(problem)
    return train, validation


def _encode(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> _Examples:
    """Return questions with their answers and eos as token ids and labels."""
    prompts = [tokenizer.encode(problem.question) for problem in problems]
    answers = [[*tokenizer.encode(p.answer), tokenizer.eos_token_id] for p in problems]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[_IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return _Examples(_pad(rows, tokenizer.pad_token_id), _pad(labels, _IGNORED))


def _pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return rows of different lengths as one tensor (N, T), filled up with `value` on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _pretrain(
    model: LlamaForCausalLM, train: _Examples, validation: _Examples, report: Callable[[str], None]
) -> int:
    """Train the model until its accuracy is in the band; return the steps taken.

    Raise BaseModelError after MAX_STEPS.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)
    )
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        batch = train[torch.randint(len(train), (BATCH_SIZE,))]
        loss = _answer_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % STEPS_PER_MEASURE == 0:
            accuracy = _measure_accuracy(model, validation)
        if step % STEPS_PER_REPORT == 0:
            report(f"pre-training step {step}: loss {loss.item():.2f}, {accuracy:.0%} solved")
        if LOWEST_ACCURACY <= accuracy <= HIGHEST_ACCURACY:
            return step
    raise BaseModelError(
        f"expected a validation accuracy between {LOWEST_ACCURACY:.0%} and {HIGHEST_ACCURACY:.0%} "
        f"within {MAX_STEPS} steps, found {accuracy:.0%} at the last: try another seed"
    )


def _answer_loss(model: LlamaForCausalLM, batch: _Examples) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens, a scalar."""
    logits = model(input_ids=batch.input_ids[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=_IGNORED)


@torch.no_grad()
def _measure_accuracy(model: LlamaForCausalLM, examples: _Examples) -> float:
    """Return the share of questions that greedy decoding answers exactly, measured by teacher forcing.

    Both are equal: the greedy answer is right exactly when each right token is the likeliest after those
    before it.
    """
    predicted = model(input_ids=examples.input_ids[:, :-1]).logits.argmax(dim=-1)
    expected = examples.labels[:, 1:]
    right = (predicted == expected) | (expected == _IGNORED)
    return float(right.all(dim=1).float().mean())
