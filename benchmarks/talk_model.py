"""A tiny model of conversations, which reads characters and has symbols for turns and tool calls.

Each benchmark brings the conversations that the model is pre-trained on. Most of them hold a call that
cannot be run. So the model knows the right call, and seldom chooses it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.deploy.demo.base_model import train_batch

CONTEXT_TOKENS = 256

Talk = list[tuple[str, bool]]
"""A conversation in parts of text, each with whether the model is to learn to write it."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_SYMBOLS = ("<user>", "<assistant>", "<tool>", "<system>", "<tool_call>", "</tool_call>")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-=?{}\":,.'()_ "
_IGNORED = -100
_BATCH, _RATE = 32, 2e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters with the symbols of turns and calls."""
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL.values(), *_LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(symbol, special=True) for symbol in _SPECIAL.values()])
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in _SYMBOLS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS, **_SPECIAL,
    )  # fmt: skip


def make_talk_model(
    folder: Path,
    seed: int,
    make_talk: Callable[[random.Random], Talk],
    report: Callable[[str], None],
    steps: int = 500,
) -> Path:
    """Pre-train a model, save it as a Hugging Face folder and return the folder.

    `make_talk` returns a new conversation, whose random choices come from its argument. `report` gets a
    line of text about the loss every 50 of the `steps`. 500 take two minutes of one core.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    draw, tokenizer = random.Random(seed), make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, head_dim=32, max_position_embeddings=CONTEXT_TOKENS,
            pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        ids, labels = _encode([make_talk(draw) for _ in range(_BATCH)], tokenizer)
        loss = train_batch(model, optimizer, ids, labels)
        schedule.step()
        if step % 50 == 0:
            report(f"pre-training step {step} of {steps}: loss {loss:.3f}")
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _encode(talks: list[Talk], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded token ids (N, T), and labels that ignore what the model is not to write."""
    rows, labels = [], []
    for talk in talks:
        parts = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in talk]
        rows.append([token for ids, _ in parts for token in ids])
        labels.append([token if own else _IGNORED for ids, own in parts for token in ids])
    width = max(map(len, rows))
    padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]
    ignored = [row + [_IGNORED] * (width - len(row)) for row in labels]
    return torch.tensor(padded), torch.tensor(ignored)
