"""The prompt of a question as token ids, by LEARNER_PROMPT_TEMPLATE and the variables beside it."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.common.chat.renderer import ChatRenderer
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.text import short
from penstock.common.wire.contract import ChatSpec

_NAMED = ("auto", "chat", "none", "r1", "qwen_r1")
"""The values of LEARNER_PROMPT_TEMPLATE that name no file."""

_RESERVED = frozenset({
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
})  # fmt: skip
"""Arguments of transformers' apply_chat_template that are no variables, or that Penstock sets."""

R1_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with "
    "the answer. The reasoning process and answer are enclosed within <think> </think> and <answer> "
    "</answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here "
    "</answer>"
)
"""The prompt of DeepSeek-R1-Zero (arXiv:2501.12948, table 1), in the wording of ms-swift and Open R1."""

QWEN_R1 = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    + R1_PROMPT
    + "Put your final answer within \\boxed{{}}.\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
"""MindSpeed-RL's template `qwen_r1`."""


class Template:
    """Converts a question to prompt tokens by LEARNER_PROMPT_TEMPLATE and LEARNER_SYSTEM_PROMPT.

    `chat` is the chat template for the contract, None if none makes the prompts.
    Creating a Template raises ConfigError if the tokenizer lacks the chat template that is asked for, if
    a template is unknown or its file unreadable, or if variables contradict each other.
    """

    def __init__(self, settings: LearnerSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._kind = settings.prompt_template
        self._system = read_prompt(settings.system_prompt)
        own = bool(getattr(tokenizer, "chat_template", None))
        template: str | None = None
        if self._kind == "chat" and not own:
            raise ConfigError(
                "LEARNER_PROMPT_TEMPLATE=chat, but the model's tokenizer has no chat template: set "
                "LEARNER_PROMPT_TEMPLATE to auto, none, or a file *.jinja"
            )
        if self._kind in ("r1", "qwen_r1") and self._system:
            raise ConfigError(
                f"LEARNER_PROMPT_TEMPLATE={self._kind} has a system prompt of its own: leave "
                "LEARNER_SYSTEM_PROMPT empty"
            )
        if self._kind not in _NAMED:
            template = _read_template(self._kind)
        self._template_name = "the tokenizer's own" if template is None else self._kind
        self._renderer: ChatRenderer | None = None
        self.chat: ChatSpec | None = None
        found = tokenizer.get_chat_template(template) if is_chat(settings, tokenizer) else None
        _check_variables(settings, found, self._template_name)
        if found is not None:
            variables = {**tokenizer.special_tokens_map, **settings.chat_template_kwargs}
            self._renderer = ChatRenderer(found, variables)
        if self._kind == "r1":
            self._system = R1_PROMPT
        if found is not None:
            self.chat = ChatSpec(found, variables, self._system)

    def render(self, prompt: object, tools: Sequence[Any] = ()) -> list[int]:
        """Return the token ids of a question: a text, or a list of messages with role and content.

        The system prompt comes first, and a chat template begins the assistant's turn at the end. A chat
        template shows `tools`, JSON schemas, to the model if it knows tools. Raise ConfigError if the
        chat template rejects the messages.
        """
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        if self._kind == "qwen_r1":
            return self._encode(QWEN_R1.format(question=_contents(messages)), special=False)
        if self._kind == "r1" and not self._renderer:
            return self._encode(f"{R1_PROMPT}\nUser: {_contents(messages)}\nAssistant:", special=True)
        if self._system:
            messages = [{"role": "system", "content": self._system}, *messages]
        if self._renderer:
            return self._encode(self._chat(messages, tools), special=False)
        return self._encode(_contents(messages), special=True)

    def _chat(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> str:
        """Return the messages as one text by the chat template; raise ConfigError if it rejects them."""
        assert self._renderer is not None
        try:
            return self._renderer.render(messages, tools)
        except ValueError as error:
            roles = short(", ".join(str(message.get("role")) for message in messages))
            raise ConfigError(
                f"LEARNER_PROMPT_TEMPLATE: the chat template ({self._template_name}) fails on messages "
                f"of the roles {roles}: {short(error, 300)}. Correct the template or the messages' "
                "roles, or set LEARNER_PROMPT_TEMPLATE=none."
            ) from error

    def _encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text; `special` adds the tokenizer's own, such as the start of text."""
        found: list[int] = self._tokenizer(text, add_special_tokens=special).input_ids
        return found


def _check_variables(settings: LearnerSettings, template: str | None, name: str) -> None:
    """Raise ConfigError for a variable of chat_template_kwargs that would have no effect.

    `template` is the chat template called `name`, None if none makes the prompts. Raise ConfigError as
    well for a variable that Penstock sets itself.
    """
    variables = settings.chat_template_kwargs
    if variables and template is None:
        raise ConfigError(
            f"LEARNER_CHAT_TEMPLATE_KWARGS has no effect: with LEARNER_PROMPT_TEMPLATE="
            f"{settings.prompt_template} no chat template makes this model's prompts. Leave it out, or "
            "name a template"
        )
    if taken := _RESERVED & set(variables):
        raise ConfigError(
            f"LEARNER_CHAT_TEMPLATE_KWARGS: {', '.join(sorted(taken))} cannot be set: expected "
            "variables of the template alone, such as enable_thinking"
        )
    known = set(re.findall(r"[A-Za-z_]\w*", template or ""))
    if unused := [variable for variable in variables if variable not in known]:
        near = difflib.get_close_matches(unused[0], sorted(known)[:1000], n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
        raise ConfigError(
            f"LEARNER_CHAT_TEMPLATE_KWARGS: the chat template ({name}) has no variable "
            f"{short(unused[0])}, so its value would have no effect: {hint}"
        )


def is_chat(settings: LearnerSettings, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat template makes the prompts: the tokenizer's own, or one in a file."""
    kind = settings.prompt_template
    own = bool(getattr(tokenizer, "chat_template", None)) and kind in ("auto", "chat", "r1")
    return own or kind not in _NAMED


def _contents(messages: list[dict[str, Any]]) -> str:
    """Return the messages' contents without their roles, one after the other in lines of their own."""
    return "\n".join(str(message["content"]).strip() for message in messages)


def read_prompt(text: str) -> str:
    """Return a prompt as it is, or the text of the file it names (*.txt, *.md).

    Raise ConfigError, naming LEARNER_SYSTEM_PROMPT, if the file cannot be read.
    """
    is_file = text.endswith((".txt", ".md")) and "\n" not in text
    return _read_file(text, "LEARNER_SYSTEM_PROMPT") if is_file else text


def _read_template(name: str) -> str:
    """Return the chat template in a file *.jinja; raise ConfigError for another name or no such file."""
    if not name.endswith((".jinja", ".j2")):
        raise ConfigError(
            f"LEARNER_PROMPT_TEMPLATE={name}: expected auto, chat, none, r1, qwen_r1, or a chat "
            "template in a file *.jinja"
        )
    return _read_file(name, "LEARNER_PROMPT_TEMPLATE")


def _read_file(name: str, variable: str) -> str:
    """Return a file's text; raise ConfigError, naming the variable, if the file cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable}={name}: cannot be read: {error}") from error
