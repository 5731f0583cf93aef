"""A tokenizer of a few letters, for models that are made in tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = ("<pad>", "<bos>", "<eos>", *"0123456789+-= abcdefghijklmno")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single letters (32 of them) to a model folder."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
