"""A Llama small enough to train in seconds, and what a trainer computes with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.common.wire.messages import Int32s

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = ["<pad>", "<bos>", "<eos>", *"0123456789+-= "]


def make_model(tied: bool = True) -> LlamaForCausalLM:
    """An untrained model, always the same. If `tied`, its head is its embedding."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=256,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
            tie_word_embeddings=tied,
        )
    )  # fmt: skip


def train_pair(folder: Path, dtypes: list[str]) -> dict[str, tuple[Path, Path]]:
    """Two versions of one model, a few training steps apart, saved in each precision of `dtypes`."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for name, steps in (("a", 60), ("b", 20)):
        train(model, optimizer, steps)
        for dtype in dtypes:
            save_model(model, folder / dtype / name, dtype)
    return {dtype: (folder / dtype / "a", folder / dtype / "b") for dtype in dtypes}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train on sequences that repeat three digits."""
    for _ in range(steps):
        optimizer.zero_grad()
        ids = _repeated_digits(32)
        model(input_ids=ids, labels=ids.masked_fill(ids == PAD, -100)).loss.backward()
        optimizer.step()


def load(folder: Path) -> LlamaForCausalLM:
    """The model as a trainer holds it, in the precision it was saved in."""
    return LlamaForCausalLM.from_pretrained(folder, dtype="auto").eval()


@torch.no_grad()
def teacher_forced(
    model: LlamaForCausalLM, pairs: list[tuple[Int32s, Int32s]], temperature: float
) -> list[np.ndarray]:
    """Log-probabilities (T,) of each completion's tokens, as a learner computes them.

    `pairs` are prompt and completion; all go through the model as one batch, padded on the right.
    """
    rows = [torch.from_numpy(np.concatenate(pair).astype(np.int64)) for pair in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    logprobs = torch.log_softmax(model(ids).logits.float() / temperature, dim=-1)
    chosen = logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
    return [
        row[len(prompt) - 1 : len(prompt) + len(tokens) - 1]
        for row, (prompt, tokens) in zip(chosen, pairs, strict=True)
    ]


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompts: list[Int32s], max_tokens: int) -> list[list[int]]:
    """The model's own greedy answers to prompts of one length, up to the end of the sequence."""
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
    answers = model.generate(ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=PAD)
    return [
        [token for token in answer if token != PAD] for answer in answers[:, ids.shape[1] :].tolist()
    ]


def _repeated_digits(count: int) -> torch.Tensor:
    """Sequences like 1 7 4 1 7 4 1 ... of random length with an end, padded."""
    rows = torch.full((count, 66), PAD)
    for row in rows:
        length = int(torch.randint(10, 64, ()))
        row[1 : 1 + length] = torch.randint(3, 13, (3,)).repeat(22)[:length]
        row[0], row[1 + length] = BOS, EOS
    return rows


def save_model(model: LlamaForCausalLM, folder: Path, dtype: str) -> None:
    saved = LlamaForCausalLM(model.config)
    saved.load_state_dict(model.state_dict())
    saved.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
