"""A tokenizer of a few letters, for models that are made in tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = ("<pad>", "<bos>", "<eos>", *"0123456789+-= abcdefghijklmno")


CALL = '<tool_call>{"name": "up", "arguments": {"by": 1}}</tool_call>'
"""A tool call that is one token of the tokenizer of conversations."""

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}<eos>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""The chat template of that tokenizer."""


def save_tokenizer(folder: Path, *, talks: bool = False, call: str = CALL) -> None:
    """Write a tokenizer of single letters (32 of them) to a model folder, if it `talks` with `call`."""
    letters = (*LETTERS, call) if talks else LETTERS
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        chat_template=CHAT_TEMPLATE if talks else None,
    ).save_pretrained(folder)  # fmt: skip
