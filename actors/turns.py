"""Turns that are added to a conversation's tokens without tokenizing a sampled token again.

The template is asked for the text of the conversation before and after the answers of the tools. What
the template adds behind the end token of the last completion is the suffix. Its tokens are appended to
those that the engine sampled. This is exact if four things hold, each of which is checked for each turn:

1. The text of the messages so far is the beginning of the longer text: no earlier message is rewritten.
2. The completion ended with an end token that the template writes behind the assistant's text.
3. The suffix does not depend on the assistant's text.
4. The end token is split off before any other text is tokenized, so that no token reaches across it.

Where one of them fails, `extend` returns None, and the conversation ends there.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.common.chat.renderer import ChatRenderer, RendererFailed
from penstock.common.episodes.pool import EpisodeFailed
from penstock.common.log import get_logger
from penstock.common.text import short
from penstock.common.wire.contract import ChatSpec
from penstock.common.wire.messages import Int32s

Message = dict[str, Any]

_OTHER_TEXT = "a text in place of the assistant's"

log = get_logger(__name__)


class TurnTemplate:
    """The chat template of a run, for prompts and for further turns. `folder` holds the tokenizer.

    `unproven` says in a warning what happens where no turn can be added exactly. The methods may be
    called from several threads. They wait for one process, which renders.
    """

    def __init__(self, chat: ChatSpec, folder: Path, unproven: str = "Conversations end there") -> None:
        self._unproven = unproven
        self._system = chat.system_prompt
        self._renderer = ChatRenderer(chat.template, chat.variables)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._logged = False
        self._lock = threading.Lock()

    def messages_of(self, prompt: object, observation: str | None = None) -> list[Message]:
        """Return the messages of a question, a text or a list of messages, after the system prompt.

        An observation, which an environment's `reset` returned, is added to the last user's message, as
        in TRL; without a last user's message it is one of its own.
        """
        given = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        messages = [dict(message) for message in given]
        if self._system:
            messages.insert(0, {"role": "system", "content": self._system})
        if observation is None:
            return messages
        if messages and messages[-1].get("role") == "user":
            messages[-1]["content"] = f"{messages[-1].get('content') or ''}{observation}"
        else:
            messages.append({"role": "user", "content": observation})
        return messages

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any]) -> Int32s:
        """Return the tokens of a prompt (P,). Raise ValueError if the template refuses the messages."""
        with self._lock:
            text = self._renderer.render(messages, tools)
        return self._encode(text)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion without its end token; other special tokens stay."""
        ids = list(token_ids)
        if ids and ids[-1] in self._added:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def extend(
        self,
        messages: Sequence[Message],
        assistant: Message,
        answers: Sequence[Message],
        tools: Sequence[Any],
        last_token: int,
    ) -> Int32s | None:
        """Return the tokens behind `last_token` up to the assistant's next turn, None if unproven.

        `messages` are those before the assistant's message, `answers` those after it. The first reason
        for a None is logged. Raise EpisodeFailed if the template's process ended or took too long.
        """
        try:
            with self._lock:
                suffix, reason = self._suffix(messages, assistant, answers, tools, last_token)
        except RendererFailed as error:
            raise EpisodeFailed(f"the chat template failed: {short(error, 300)}") from error
        except ValueError as error:
            suffix, reason = "", f"it fails: {short(error, 300)}"
        if not reason:
            end = str(self._tokenizer.id_to_token(last_token))
            ids = self._encode(end + suffix)
            if len(ids) and ids[0] == last_token:
                return ids[1:]
            reason = "the tokenizer joins the end token with the text behind it"
        if not self._logged:
            self._logged = True
            log.warning(
                f"{self._unproven}: no turn can be added to sampled tokens by this chat template, "
                f"because {reason}. Name a template that fits by LEARNER_PROMPT_TEMPLATE. Later cases "
                "are only counted."
            )
        return None

    def _suffix(
        self, messages: Sequence[Message], assistant: Message, answers: Sequence[Message],
        tools: Sequence[Any], last_token: int,
    ) -> tuple[str, str]:  # fmt: skip
        """Return the text behind the end token, or "" and the reason why it is not proven.

        Raise ValueError if the template refuses the messages.
        """
        if last_token not in self._added:
            return "", "the completion did not end with an end token"
        end = str(self._tokenizer.id_to_token(last_token))
        prompt = self._renderer.render(messages, tools)
        found: list[str] = []
        for content in (assistant.get("content"), _OTHER_TEXT):
            said = {**assistant, "content": content}
            before = self._renderer.render([*messages, said], tools, add_generation_prompt=False)
            after = self._renderer.render([*messages, said, *answers], tools)
            if not after.startswith(before):
                return "", "it writes a completion otherwise once an answer follows"
            if not before.startswith(prompt):
                return "", "it writes the prompt otherwise once a completion follows"
            place = before.rfind(end)
            if place < len(prompt) or (content == _OTHER_TEXT and before.rfind(content) > place):
                return "", f"it does not write the end token {short(end)} behind a completion"
            found.append(after[place + len(end) :])
        if found[0] != found[1]:
            return "", "what it adds depends on the completion"
        return found[0], ""

    def _encode(self, text: str) -> Int32s:
        """Return the tokens of a text, without those that a tokenizer adds around a text."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype="<i4")


def answer_message(name: str, text: str) -> Message:
    """Return the message of a tool's answer, in the form of TRL."""
    return {"role": "tool", "name": name, "content": text}
