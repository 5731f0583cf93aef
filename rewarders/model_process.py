"""The process in which a reward model runs: a sequence classification model with one output.

    python -m penstock.rewarders.model_process FD

Reads frames of requests from the socket FD, and answers each with a frame. The first request names the
model; further ones have the conversations of completions. The process ends with its socket.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.common.chat.renderer import ChatRenderer
from penstock.common.errors import ConfigError
from penstock.common.files.reading import ADAPTER, hash_model
from penstock.common.sandbox import frames
from penstock.common.sandbox.limits import die_with_parent
from penstock.common.transfer.hub import outage_of


class TooLong(ValueError):
    """A conversation is longer than the model's context."""


class TemplateFailed(ValueError):
    """The model's chat template refuses a conversation, or takes too long or too much memory for it."""


class RewardModel:
    """A model, loaded from the safetensors files of `folder`, that gives a number for a conversation.

    `device` is as torch names it, "" for a GPU if there is one, else the CPU, where numbers are float32.
    The model reads `batch_size` conversations at a time, or 1 without a padding token. Creating it
    raises ConfigError for a model that has not exactly one output or for a folder with an adapter, which
    transformers would load from pickles too, and transformers' errors if a file is
    missing.
    """

    def __init__(self, folder: Path, device: str, batch_size: int) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if (folder / ADAPTER).exists():
            raise ConfigError(f"{folder} has {ADAPTER}: name a folder with whole weights")
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        dtype = torch.float32 if self._device == "cpu" else "auto"
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, trust_remote_code=False, dtype=dtype, use_safetensors=True
        )
        if (outputs := model.config.num_labels) != 1:
            found = f"the model in {folder} has {outputs} outputs, expected a reward model with one"
            raise ConfigError(f"{found}: name another in LEARNER_REWARDS")
        text = model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = self._tokenizer.pad_token_id
        self._longest = getattr(text, "max_position_embeddings", None) or sys.maxsize
        self._batch_size = batch_size if text.pad_token_id is not None else 1
        self._pad = text.pad_token_id or 0
        self._renderer: ChatRenderer | None = None
        if getattr(self._tokenizer, "chat_template", None):
            template = self._tokenizer.get_chat_template()
            self._renderer = ChatRenderer(template, self._tokenizer.special_tokens_map)
        self._model = model.to(self._device).eval()

    def score(self, talks: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        """Return the model's number for each of `talks`, in order; any float, also NaN. [] gives [].

        A conversation is a list of messages with role and content. Raise TooLong, before the model runs,
        if one has more tokens than the model's context, or TemplateFailed. A model whose config names no
        context has no limit.
        """
        rows = [self._tokens(talk) for talk in talks]
        for number, row in enumerate(rows):
            if len(row) > self._longest:
                raise TooLong(
                    f"conversation {number} of a group has {len(row)} tokens, and the reward model "
                    f"takes at most {self._longest}: lower LEARNER_MAX_COMPLETION_LENGTH"
                )
        found: list[float] = []
        for start in range(0, len(rows), self._batch_size):
            found += self._score_batch(rows[start : start + self._batch_size])
        return found

    def _tokens(self, talk: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, a list of messages, by the tokenizer's chat template.

        Without a template, tokenize the messages' contents, joined with nothing between them. The
        tokenizer then adds its special tokens; with a template they come from the template alone. Raise
        TemplateFailed if the template gives no text, within its limits of time and memory.
        """
        if self._renderer is not None:
            try:
                text = self._renderer.render(talk, add_generation_prompt=False)
            except ValueError as error:
                raise TemplateFailed(f"the reward model's chat template: {error}") from error
            return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        texts = "".join(str(message.get("content") or "") for message in talk)
        return list(self._tokenizer(texts).input_ids)

    def _score_batch(self, rows: Sequence[list[int]]) -> list[float]:
        """Return the model's first output for each of `rows`, the token ids of conversations, in order.

        Rows are padded on the right to the longest one. There must be at least one row.
        """
        import torch

        longest = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
            ).logits
        return [float(number) for number in logits[:, 0].float().cpu()]


def load(asked: Mapping[str, Any]) -> RewardModel:
    """Load the model of the request `asked`, with its `device` and `batch_size`, and return the model.

    With a `revision`, `model` is a hub id, and that commit is downloaded if it is not in the cache. Else
    `model` is a folder whose files have the hash `digest`. Raise ConfigError if there is no such folder
    here, its files have another hash, or the model has not exactly one output; and a download's errors.
    """
    place = str(asked["model"])
    if asked.get("revision"):
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.jinja"]
        place = snapshot_download(place, revision=asked["revision"], allow_patterns=wanted)
    elif not os.path.isdir(place):
        missing = f"there is no folder {place} with the reward model on this host"
        raise ConfigError(f"{missing}: copy the learner's folder to this path")
    elif hash_model(Path(place)) != asked["digest"]:
        found = f"the reward model's files in {place}"
        raise ConfigError(f"{found} are not the learner's: copy the learner's folder to this path")
    return RewardModel(Path(place), asked["device"], asked["batch_size"])


def serve(channel: socket.socket) -> None:
    """Answer the requests that come on the socket `channel`; return once its other end is closed.

    The first request names a model, see `load`; loading the model is answered by {"value": []}. Later
    requests have `talks`, lists of messages, and are answered by {"value": numbers}. An error is
    answered by {"mistake": text}, in which "outage" says whether the hub is away. Return after any error
    but one of a conversation that is too long or that the template refuses, as a device may be lost; the
    answer then has `ends` too.
    """
    model: RewardModel | None = None
    with contextlib.suppress(EOFError, ConnectionError):  # the rewarder has closed its end
        while True:
            asked = frames.receive_request(channel)
            try:
                if model is None:
                    model = load(asked)
                    frames.send(channel, {"value": []})
                else:
                    frames.send(channel, {"value": model.score(asked["talks"])})
            except (TooLong, TemplateFailed) as error:
                frames.send(channel, {"mistake": str(error)})
            except Exception as error:  # transformers raises whatever its parts raise
                text = frames.short(f"{type(error).__name__}: {error}")
                away = model is None and outage_of(error, "") is not None
                frames.send(channel, {"mistake": text, "outage": away, "ends": True})
                return


if __name__ == "__main__":
    die_with_parent()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(socket.socket(fileno=int(sys.argv[1])))
