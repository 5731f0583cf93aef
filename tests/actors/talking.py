"""For conversations: an engine that writes tool calls, a tokenizer with chat symbols, chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.actors.engine import Aborted
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Span, Version

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's form, and that of Qwen 2.5: a symbol ends each turn, a line end follows."""

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's form: tools in the system's turn, answers of tools together in one turn of the user."""

HEADERS = (
    "<|bos|>{% for m in messages %}<|start_header|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header|>\n\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
"""Llama 3's form: headers, and nothing behind the symbol that ends a turn."""

REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role != 'assistant' else 'left out' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A form that leaves out what the assistant wrote in earlier turns, as some do with its reasoning."""

SYMBOLS = ("<|im_start|>", "<|im_end|>", "<|bos|>", "<|start_header|>", "<|end_header|>")
WORDS = ("the sum of", "  is", "\n\nso", "add", " 12", "7", "}", '{"', "état", "…", "\t", "ok.")


def save_chat_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer with the symbols of the templates to a folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [CHATML, WITH_TOOLS, '{"name": "add", "arguments": {"a": 1}}\n\n', *WORDS] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(symbol, special=True) for symbol in SYMBOLS])
    tokenizer.save(str(folder / "tokenizer.json"))


def call_of(name: str = "add", **arguments: object) -> str:
    """The text of a tool call, with spaces that no template writes."""
    return f"<tool_call> {json.dumps({'name': name, 'arguments': arguments})}\n  </tool_call>"


@dataclass
class TalkingEngine:
    """Writes the next text of `script` of each conversation; `asked` has each request as it came.

    The tokens of a text are cut at random places, so that joining them and tokenizing their text again
    gives other tokens. `version` is of the number of completions so far, if `versions_move`.
    """

    tokenizer: Tokenizer
    script: list[str]
    versions_move: bool = False
    asked: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    samplings: dict[str, Sampling] = field(default_factory=dict)
    since: dict[str, Version | None] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def text_for(self, name: str) -> str:
        """The text of a request `GROUP#INDEX.TURN`."""
        return self.script[min(int(name.rpartition(".")[2]), len(self.script) - 1)]

    def tokens_of(self, text: str, random: np.random.Generator) -> list[int]:
        """The tokens of a completion, the end of its turn included."""
        return [*odd_tokens(self.tokenizer, text, random), self.tokenizer.token_to_id("<|im_end|>")]

    async def generate(
        self, name: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int,
        since: Version | None = None,
    ) -> tuple[Rollout, ...]:  # fmt: skip
        if name in self.aborted:
            raise Aborted(name)
        assert num_generations == 1
        self.samplings[name], self.since[name] = sampling, since
        random = np.random.default_rng(len(self.asked))
        ids = self.tokens_of(self.text_for(name), random)
        finish = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        assert name not in self.asked
        self.asked[name] = (prompt_ids.tolist(), ids)
        version = Version(1, len(self.asked) if self.versions_move else 0)
        return (
            Rollout(
                token_ids=np.array(ids, dtype="<i4"),
                logprobs=-random.random(len(ids)).astype("<f4"),
                mask=np.ones(len(ids), dtype=bool),
                spans=(Span(version, 0, len(ids), "ff"),),
                finish_reason=finish,
            ),
        )

    async def abort(self, name: str) -> None:
        self.aborted.add(name)

    def room(self) -> int:
        return 1000

    def tokens_generated(self) -> int:
        return sum(len(said) for _, said in self.asked.values())

    def prefix_cache(self) -> tuple[int, int]:
        return 0, 0


def odd_tokens(tokenizer: Tokenizer, text: str, random: np.random.Generator) -> list[int]:
    """Tokens of a text that no tokenizer would choose: of pieces that are cut at random places."""
    found: list[int] = []
    at = 0
    while at < len(text):
        length = int(random.integers(1, 6))
        found += tokenizer.encode(text[at : at + length], add_special_tokens=False).ids
        at += length
    return found
