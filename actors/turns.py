"""Turns that are added to a conversation's tokens without tokenizing a sampled token again.

The template is asked for the text of the conversation before and after the answers of the tools. What
the template adds behind the end token of the last completion is the suffix. Its tokens are appended to
those that the engine sampled. This is exact if four things hold, each of which is checked for each turn:

1. The text of the messages so far is the beginning of the longer text: no earlier message is rewritten.
2. The completion ended with an end token that the template writes behind the assistant's text.
3. The suffix does not depend on the assistant's text.
4. The end token is split off before any other text is tokenized, so that no token reaches across it.

Where one of them fails, `extend` returns None, and the conversation ends there.

For models that the library `renderers` knows, the library takes the template's place: it reads the calls
in a completion and writes the tokens behind it. The tokens before stay as they are here too.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.actors.tool_calls import ToolCall, read_calls
from penstock.common.chat.known_format import KnownFormat, read_tokenizer
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
    """The chat template of a run, for prompts and for further turns. `folder` holds tokenizer.json.

    `chat` has the template, its variables, the system prompt, and "" or the name of a format of the
    library `renderers` that adds the turns. `unproven` begins the warning that no turn can be added
    exactly. The methods may be called from several threads. They wait for one process, which renders and
    is started by the first call. Raise ConfigError if the format cannot be used here. If tokenizer.json
    cannot be read, the library tokenizers raises Exception.
    """

    def __init__(self, chat: ChatSpec, folder: Path, unproven: str = "Conversations end there") -> None:
        self._unproven = unproven
        self._system = chat.system_prompt
        self._renderer = ChatRenderer(chat.template, chat.variables, chat.renderer, str(folder))
        self._tokenizer = read_tokenizer(folder)
        self._added = self._tokenizer.get_added_tokens_decoder()
        end = chat.variables.get("eos_token")
        self._ends = {number for number, one in self._added.items() if one.special or one.content == end}
        self._format: KnownFormat | None = None
        if chat.renderer:
            self._format = KnownFormat(chat.renderer, self._tokenizer, chat.variables)
        self._logged = False
        self._lock = threading.Lock()

    def messages_of(self, prompt: object, observation: str | None = None) -> list[Message]:
        """Return new messages for a question: the system prompt, if the run has one, then the `prompt`.

        A prompt that is no list of messages becomes a user's message. `observation`, the text that an
        environment's `reset` returned, is appended to the last message if that is a user's, as in TRL;
        else it becomes a user's message of its own. None adds nothing. Raise EpisodeFailed for a list
        that has another thing than messages.
        """
        messages = _messages_in(prompt)
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
        """Return the tokens (P,) of messages and the beginning of the assistant's turn, by the template.

        `tools` are the JSON schemas that the template shows. Raise ValueError if the template refuses
        the messages, or its subclass RendererFailed if its process ended or took over 10 s.
        """
        with self._lock:
            text = self._renderer.render(messages, tools)
        return self._encode(text)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion without its end token; other special tokens stay.

        The end token is a last token that is special, such as <|im_end|>, or the template's eos_token.
        A token such as </think> is text.
        """
        ids = list(token_ids)
        if ids and ids[-1] in self._ends:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def read(
        self, prompt_ids: Int32s, completion_ids: Int32s, tools: Sequence[Any]
    ) -> tuple[str, list[ToolCall]]:
        """Return the text of a completion without its tool calls, and the calls in their order.

        `prompt_ids` (P,) are all tokens before `completion_ids` (T,), `tools` the JSON schemas of the
        tools. Calls after the first 64 become one with an error. If the library renderers cannot read a
        completion, return the whole text and []. Raise EpisodeFailed if its process ends, or takes 10 s.
        """
        before, ids = prompt_ids.tolist(), completion_ids.tolist()
        if self._format is None:
            return read_calls(self.text_of(ids))
        try:
            with self._lock:
                text, found = self._renderer.read(prompt_ids=before, completion_ids=ids, tools=tools)
        except RendererFailed as error:
            raise EpisodeFailed(f"a completion cannot be read: {short(error, 300)}") from error
        except ValueError:  # of what a model wrote
            return self.text_of(ids), []
        return text, [ToolCall(*call) for call in found]

    def extend(
        self,
        messages: Sequence[Message],
        assistant: Message,
        answers: Sequence[Message],
        tools: Sequence[Any],
        prompt_ids: Int32s,
        completion_ids: Int32s,
    ) -> Int32s | None:
        """Return the tokens to append after a completion for `answers`, up to the assistant's next turn.

        `messages` are those before the `assistant` message, `answers` those after it; `tools` are the
        JSON schemas that the template shows. `prompt_ids` (P,) are all tokens before `completion_ids`
        (T,), T above 0. Return None if it cannot be proven that the appended tokens are exactly those of
        the template; the first None is logged with its reason. Raise EpisodeFailed if the template's
        process ended or took over 10 s.
        """
        ids: Int32s | None = None
        try:
            with self._lock:
                if self._format is not None:
                    ids, reason = self._bridge(prompt_ids, completion_ids, answers, tools)
                else:
                    last = int(completion_ids[-1])
                    ids, reason = self._suffix_ids(messages, assistant, answers, tools, last)
        except RendererFailed as error:
            raise EpisodeFailed(
                f"no turn can be added to a conversation: {short(error, 300)}"
            ) from error
        except ValueError as error:
            reason = f"it fails: {short(error, 300)}"
        if ids is None and not self._logged:
            self._logged = True
            log.warning(
                f"{self._unproven}: no turn can be added to sampled tokens by this chat template, "
                f"because {reason}. Name a template that fits by LEARNER_PROMPT_TEMPLATE, or the format "
                "of the model by LEARNER_RENDERER. Later cases are not logged."
            )
        return ids

    def _bridge(
        self,
        prompt_ids: Int32s,
        completion_ids: Int32s,
        answers: Sequence[Message],
        tools: Sequence[Any],
    ) -> tuple[Int32s | None, str]:
        """Return the tokens (N,) that the library renderers appends, and ""; or None and the reason.

        They follow `completion_ids` (T,), and hold the messages `answers` and the beginning of the next
        turn. `prompt_ids` (P,) are all tokens before, `tools` the JSON schemas. The reason says
        that earlier tokens would change. Raise ValueError if the format cannot hold `answers`.
        """
        assert self._format is not None
        found = self._format.extend(prompt_ids.tolist(), completion_ids.tolist(), answers, tools)
        if found is None:
            return None, "the library renderers would write earlier tokens anew"
        return np.array(found, dtype="<i4"), ""

    def _suffix_ids(
        self, messages: Sequence[Message], assistant: Message, answers: Sequence[Message],
        tools: Sequence[Any], last_token: int,
    ) -> tuple[Int32s | None, str]:  # fmt: skip
        """Return the tokens (N,) that the chat template appends, and ""; or None and the reason.

        The tokens hold `answers` and the start of the next assistant turn. They follow `last_token`, the
        end token of the completion, which is not among them. `messages` are those before the `assistant`
        message, `tools` the JSON schemas. The reason says why it is not proven that the tokens are
        exact. Raise ValueError if the template refuses the messages, or its subclass RendererFailed if
        its process ended or took over 10 s.
        """
        suffix, reason = self._suffix(messages, assistant, answers, tools, last_token)
        if reason:
            return None, reason
        ids = self._encode(str(self._tokenizer.id_to_token(last_token)) + suffix)
        if len(ids) and ids[0] == last_token:
            return ids[1:], ""
        return None, "the tokenizer joins the end token with the text behind it"

    def _suffix(
        self, messages: Sequence[Message], assistant: Message, answers: Sequence[Message],
        tools: Sequence[Any], last_token: int,
    ) -> tuple[str, str]:  # fmt: skip
        """Return (text that the template writes behind a completion's end token, ""), or ("", reason).

        The reason says why it is not proven that the text is exact. `messages` are those before the
        `assistant` message, `answers` those after it. Raise ValueError if the template refuses the
        messages, or its subclass RendererFailed if its process ended or took over 10 s.
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
        """Return the ids (P,) of a text's tokens, without those that a tokenizer adds around a text."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype="<i4")


def answer_message(name: str, text: str) -> Message:
    """Return a tool's answer as TRL's message {"role": "tool", "name": name, "content": text}."""
    return {"role": "tool", "name": name, "content": text}


def _messages_in(prompt: object) -> list[Message]:
    """Return new messages: those of `prompt`, or a user's with its text.

    Raise EpisodeFailed for a list that has another thing than messages.
    """
    given = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    if not all(isinstance(message, dict) for message in given):
        raise EpisodeFailed(
            "the ticket's prompt has another thing than messages, which no learner of Penstock sends: "
            "see who else writes to the queue server"
        )
    return [dict(message) for message in given]
