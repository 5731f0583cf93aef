"""The prompt of a question as token ids, by LEARNER_PROMPT_TEMPLATE and the variables beside it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.common.chat.renderer import ChatRenderer
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.reading import read_text
from penstock.common.text import did_you_mean, short
from penstock.common.wire.contract import ChatSpec

if TYPE_CHECKING:  # it takes seconds, which `penstock try-reward` need not wait
    from transformers import PreTrainedTokenizerBase

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

    `tokenizer` is the model's. The attribute `chat` is the chat template for the contract, with its
    variables and the system prompt; None if no chat template makes the prompts. `unknown_id` is the
    token for letters that have none, None without such a token of its own. Raise ConfigError if
    LEARNER_PROMPT_TEMPLATE is "chat" and the tokenizer has no chat template, if it names no known
    template, if its file or that of the system prompt cannot be read, if r1 or qwen_r1 has a system
    prompt set, or if a variable of LEARNER_CHAT_TEMPLATE_KWARGS has no effect or is reserved.
    """

    def __init__(self, settings: LearnerSettings, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        known = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))
        *others, unknown = known
        self.unknown_id = None if unknown in others else unknown
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
        """Return the token ids of a question, of any length, with the system prompt first, if any.

        `prompt` is a text, or a list of messages with role and content. A chat template also begins the
        assistant's turn at the end, and shows the model `tools` (JSON schemas) if it knows tools.
        Without a chat template the contents are joined, in r1's or qwen_r1's form if that is chosen,
        and `tools` are ignored. Raise ConfigError if the chat template rejects the messages.
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
        """Return the messages as one text by the chat template, which may show the JSON schemas `tools`.

        Raise ConfigError if the template fails on the messages, or takes over 10 s or too much memory.
        """
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
        """Return the token ids of a text; `special` adds the tokenizer's own, such as start of text."""
        found: list[int] = self._tokenizer(text, add_special_tokens=special).input_ids
        return found


def _check_variables(settings: LearnerSettings, template: str | None, name: str) -> None:
    """Raise ConfigError for a variable of chat_template_kwargs that has no effect or is reserved.

    `template` is the text of the chat template, which errors call `name`. A variable has no effect if
    its name is not in this text, or if `template` is None: then no chat template makes the prompts.
    Reserved are the names that Penstock or transformers sets.
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
            "variables of the template alone, such as enable_thinking. Leave out the others"
        )
    known = set(re.findall(r"[A-Za-z_]\w*", template or ""))
    if unused := [variable for variable in variables if variable not in known]:
        hint = did_you_mean(unused[0], sorted(known)[:1000], "leave it out")
        raise ConfigError(
            f"LEARNER_CHAT_TEMPLATE_KWARGS: the chat template ({name}) has no variable "
            f"{short(unused[0])}, so its value would have no effect: {hint}"
        )


def is_chat(settings: LearnerSettings, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a chat template makes the prompts, by LEARNER_PROMPT_TEMPLATE.

    This is so for auto, chat and r1 if `tokenizer` has a chat template, and for the name of a file, but
    not for none and qwen_r1.
    """
    kind = settings.prompt_template
    own = bool(getattr(tokenizer, "chat_template", None)) and kind in ("auto", "chat", "r1")
    return own or kind not in _NAMED


def _contents(messages: list[dict[str, Any]]) -> str:
    """Return the messages' contents without roles and outer blanks, joined by line ends.

    A single content is returned as it is.
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(str(message["content"]).strip() for message in messages)


def read_prompt(text: str) -> str:
    """Return a system prompt: `text` as it is, or the content of the file that it names.

    A text of one line that ends in .txt or .md names a file. Raise ConfigError, which names
    LEARNER_SYSTEM_PROMPT, if the file cannot be read as UTF-8.
    """
    is_file = text.endswith((".txt", ".md")) and "\n" not in text
    return read_text(Path(text), f"LEARNER_SYSTEM_PROMPT={text}") if is_file else text


def _read_template(name: str) -> str:
    """Return the chat template in the file `name`. Raise ConfigError if the file cannot be read.

    Raise ConfigError as well if the name does not end in .jinja or .j2.
    """
    if not name.endswith((".jinja", ".j2")):
        raise ConfigError(
            f"LEARNER_PROMPT_TEMPLATE={name}: expected auto, chat, none, r1, qwen_r1, or a chat "
            "template in a file *.jinja: change it to one of these"
        )
    return read_text(Path(name), f"LEARNER_PROMPT_TEMPLATE={name}")
