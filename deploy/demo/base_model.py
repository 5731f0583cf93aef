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
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.common.errors import PenstockError
from penstock.deploy.demo.task import Problem, TaskFiles, operand_pair, read_problems
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint

LOWEST_ACCURACY = 0.36
HIGHEST_ACCURACY = 0.44
VALIDATION_PAIRS = 250
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
MAX_STEPS = 1200
STEPS_PER_MEASURE = 6
STEPS_PER_REPORT = 30

_IGNORED = -100

Examples = tuple[Tensor, Tensor]
"""Token ids (N, T), padded; labels (N, T), the same ids with all but answer and eos _IGNORED."""


class BaseModelError(PenstockError):
    """Pre-training ended without reaching the accuracy that the demo starts from."""


def make_base_model(folder: Path, task: TaskFiles, seed: int, report: Callable[[str], None]) -> None:
    """Pre-train the base model on `task.pretrain` and save it as a Hugging Face checkpoint in `folder`.

    Takes about 35 seconds of one core, and limits torch to one thread in this process: on a busy machine
    the threads of so small a model wait for each other. The same seed makes the same model on the same
    machine. `report` receives lines of progress and of the result. A folder that an earlier call
    completed stays as it is. Raise BaseModelError when no accuracy measured within 1200 steps is from
    36% to 44%, TaskError for an unreadable question.
    """
    done = folder / "done"
    if done.is_file():
        return report(f"Using the base model of an earlier demo: {folder}")
    report("Pre-training a small Llama model, which starts with random weights. It stops when the model")
    report(f"solves about 40% of the sums of {VALIDATION_PAIRS} number pairs, which were kept aside.")
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    train, validation = _split_by_pair(read_problems(task.pretrain), seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(tokenizer)
        steps = _pretrain(model, _encode(train, tokenizer), _encode(validation, tokenizer), report)
    save_checkpoint(model, tokenizer, folder)
    solved = _measure_accuracy(model, _encode(read_problems(task.heldout), tokenizer))
    report(f"{model.num_parameters():,} parameters, {steps} pre-training steps.")
    report(f"This base model solves {solved:.1%} of the held-out sums. Its folder: {folder}")
    done.touch()


def _split_by_pair(problems: Sequence[Problem], seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on and those to validate with, no pair of operands in both.

    `seed` draws the 250 pairs of which all problems validate. The order of `problems` stays. Raise
    TaskError for an unreadable question, ValueError for fewer than 250 pairs.
    """
    pairs = [operand_pair(problem.question) for problem in problems]
    aside = set(random.Random(seed).sample(sorted(set(pairs)), VALIDATION_PAIRS))
    train = [problem for problem, pair in zip(problems, pairs, strict=True) if pair not in aside]
    return train, [problem for problem, pair in zip(problems, pairs, strict=True) if pair in aside]


def _encode(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> Examples:
    """Return questions with answers and eos as padded ids (N, T), and labels of the same shape.

    `problems` are the N pairs of question and answer. The labels are the ids, with -100 (_IGNORED) for
    the tokens of questions and padding, which is on the right. Raise ValueError for no problems.
    """
    prompts = [tokenizer.encode(problem.question) for problem in problems]
    answers = [[*tokenizer.encode(p.answer), tokenizer.eos_token_id] for p in problems]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[_IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return _pad(rows, tokenizer.pad_token_id), _pad(labels, _IGNORED)


def _pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Return N rows of at most T numbers as one tensor (N, T), filled up with `value` on the right.

    T is the length of the longest row. Raise ValueError for no rows.
    """
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _pretrain(
    model: LlamaForCausalLM, train: Examples, validation: Examples, report: Callable[[str], None]
) -> int:
    """Train the model on random batches until its accuracy is in the band; return the number of steps.

    `train` and `validation` are (token ids, labels). The accuracy on `validation` is measured each 6
    steps; the band is 36% to 44%. `report` receives a line each 30 steps and at the end. The weights of
    `model` change; batches are drawn by torch's global generator. Raise BaseModelError after 1200 steps.
    """
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        rows = torch.randint(len(train[0]), (BATCH_SIZE,))
        loss = train_batch(model, optimizer, train[0][rows], train[1][rows])
        warmup.step()
        if step % STEPS_PER_MEASURE == 0:
            accuracy = _measure_accuracy(model, validation)
        ready = LOWEST_ACCURACY <= accuracy <= HIGHEST_ACCURACY
        if ready or step % STEPS_PER_REPORT == 0:
            report(f"pre-training step {step:>3}: loss {loss:.2f}, {accuracy:.0%} solved")
        if ready:
            return step
    raise BaseModelError(
        f"expected a validation accuracy between {LOWEST_ACCURACY:.0%} and {HIGHEST_ACCURACY:.0%} "
        f"within {MAX_STEPS} steps, found {accuracy:.0%} at the last: try another --seed"
    )


def train_batch(model: LlamaForCausalLM, optimizer: Optimizer, ids: Tensor, labels: Tensor) -> float:
    """Take one step on the token ids (N, T) whose `labels` (N, T) are not -100; return the loss."""
    logits = model(input_ids=ids[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss)


@torch.no_grad()
def _measure_accuracy(model: LlamaForCausalLM, examples: Examples) -> float:
    """Return the share, 0 to 1, of `examples` that the model answers exactly by greedy decoding.

    `examples` are (token ids, labels) as `_encode` returns them. Nothing is generated (teacher forcing):
    greedy decoding gives the right answer if and only if each of its tokens is the likeliest after the
    right ones before it.
    """
    ids, labels = examples
    predicted = model(input_ids=ids[:, :-1]).logits.argmax(dim=-1)
    expected = labels[:, 1:]
    right = (predicted == expected) | (expected == _IGNORED)
    return float(right.all(dim=1).float().mean())
