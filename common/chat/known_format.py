"""The chat formats of known models, by the library `renderers`: which calls a completion makes, and the
tokens that follow it.

The library writes a format in Python in place of a template. So it reads the tool calls of formats that
differ from model to model, and adds a turn to sampled tokens also where the model's template writes
earlier turns anew, as Qwen 3's does. It is optional: `pip install 'penstock[renderers]'`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.common.errors import ConfigError
from penstock.common.files.reading import parse_json
from penstock.common.text import encodable, short
from penstock.common.wire.plain import find_fault

DEEPEST_CALL = 16
"""Most levels of a call's arguments: a transcript, which holds them, may have 32."""

MOST_CALLS = 64
"""Calls of one turn that are run. Those beyond are answered with an error."""

_FAULTS = {
    "invalid_json": "the tool call is no JSON",
    "unclosed_block": "the tool call has no end",
    "missing_name": "the tool call has no name",
    "unknown_tool": "there is no such tool",
}
"""What is wrong with a call, by the library's status of it."""

FoundCall = tuple[str, dict[str, Any], str]
"""A tool call in a completion: name, arguments, and "" or the reason why the call cannot be run."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return a model's tokenizer, without the truncation and padding that its file may have.

    If tokenizer.json in the `folder` cannot be read, the library tokenizers raises Exception.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class _Tokenizer:
    """`tokenizer` with the methods that the library calls, which are named as in transformers."""

    name_or_path = ""
    unk_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the token ids of `text`, without those added around a text. Ignore the options."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Any, **_: Any) -> str:
        """Return the text of token ids, with special tokens such as <|im_end|>. Ignore the options."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of the token with this text, None if there is none; of a list, a list of ids."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


class KnownFormat:
    """The chat format that the library calls `name`, such as qwen3, for the model's `tokenizer`.

    `variables` are those of the chat template by name. The format takes those that it knows, such as
    enable_thinking, and ignores the others. Raise ConfigError if the library is not installed or has no
    such format, or if the tokenizer lacks the format's symbols.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        try:
            from renderers import config_from_name, create_renderer
        except ImportError as error:
            raise ConfigError(
                f"LEARNER_RENDERER={name}: the library renderers cannot be imported here ({error}): "
                "pip install 'penstock[renderers]', or set LEARNER_RENDERER=none"
            ) from error
        self._tokenizer = _Tokenizer(tokenizer)
        try:
            config: Any = config_from_name(name)
            known = {key: variables[key] for key in config.template_field_names() & variables.keys()}
            self._format = create_renderer(self._tokenizer, config, chat_template_kwargs=known)
        except Exception as error:  # the library raises assertions and others for what does not fit
            raise ConfigError(
                f"LEARNER_RENDERER={name}: the library renderers has no such format, or it does not fit "
                f"this tokenizer ({short(error, 300)}): name another one, or set LEARNER_RENDERER=none"
            ) from error

    def prompt_ids(self, messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        """Return the token ids of `messages`, followed by the beginning of the assistant's turn.

        `tools` are the JSON schemas that the prompt shows to the model; empty: none. Raise ValueError if
        the format cannot hold the messages.
        """
        try:
            ids = self._format.render_ids(
                list(messages), tools=_schemas(tools), add_generation_prompt=True
            )
        except Exception as error:  # as above, for messages
            raise ValueError(f"the format refuses the messages: {short(error, 300)}") from error
        return list(ids)

    def read(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], tools: Sequence[Any]
    ) -> tuple[str, list[FoundCall]]:
        """Return the text of `completion_ids` without tool calls, and the calls in their order.

        `prompt_ids` are all tokens before it, `tools` the JSON schemas. Calls after the first 64 become
        one error. Reasoning stays in the text, as <think>...</think>, without </think> if it was cut.
        Raise ValueError if the completion cannot be read. Some take hours: see ChatRenderer.read.
        """
        try:
            ids, before = list(completion_ids), list(prompt_ids)
            found = self._format.parse_response(ids, tools=_schemas(tools), prompt_ids=before)
        except Exception as error:  # of what a model wrote, such as 10,000 opening brackets
            raise ValueError(f"the completion cannot be read: {short(error, 300)}") from error
        text = found.content
        if found.reasoning_content:
            end = "" if found.reasoning_complete is False else "</think>"
            text = f"<think>{found.reasoning_content}{end}{text}"
        return text, _found_calls(found.tool_calls)

    def extend(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], answers: Sequence[Any],
        tools: Sequence[Any],
    ) -> list[int] | None:  # fmt: skip
        """Return the token ids to append after `completion_ids`, up to the assistant's next turn.

        They hold the messages `answers`. `prompt_ids` are all tokens before the completion, `tools` the
        JSON schemas of the tools. Return None if the format would change tokens of prompt or completion.
        Raise ValueError if the format cannot hold the messages.
        """
        before = [*prompt_ids, *completion_ids]
        try:
            found = self._format.bridge_to_next_turn(
                list(prompt_ids), list(completion_ids), list(answers), tools=_schemas(tools)
            )
        except Exception as error:  # as above, for messages
            raise ValueError(f"the format refuses the messages: {short(error, 300)}") from error
        if found is None or list(found.token_ids[: len(before)]) != before:
            return None
        return list(found.token_ids[len(before) :])


def format_of_model(model: str) -> str:
    """Return the name of a model's format in the library by the model's hub id.

    Example: Qwen/Qwen3-0.6B gives qwen3. "" for an id that the library does not list, for a folder, and
    if the library is not installed.
    """
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return ""
    return str(MODEL_RENDERER_MAP.get(model, ""))


def _schemas(tools: Sequence[Any]) -> list[Any] | None:
    """Return the JSON schemas `tools` as a list, or None if there are none, as the library expects."""
    return list(tools) or None


def _found_calls(found: Sequence[Any]) -> list[FoundCall]:
    """Return the calls that the library has `found`: after the first MOST_CALLS one with an error."""
    calls = [_found_call(call) for call in found[:MOST_CALLS]]
    if len(found) > MOST_CALLS:
        calls.append(("", {}, f"{len(found)} tool calls in one turn, expected at most {MOST_CALLS}"))
    return calls


def _found_call(call: Any) -> FoundCall:
    """Return the name, arguments and error of `call`, which the library has read.

    The error is "" for a call that can be run. With an error the arguments are empty, and the name is ""
    if the call has none.
    """
    status = str(call.status)
    error = "" if status == "ok" else _FAULTS.get(status, "the tool call is malformed")
    name = encodable(call.name) if isinstance(call.name, str) else ""
    arguments: Any = call.arguments or {}
    if isinstance(arguments, str):  # some models write them as a text with JSON
        with suppress(ValueError):
            arguments = parse_json(arguments)
    if not error and (not isinstance(arguments, dict) or find_fault(arguments, DEEPEST_CALL)):
        error = f"the arguments of the tool call: expected a JSON map of at most {DEEPEST_CALL} levels"
    return name, {} if error else arguments, error
