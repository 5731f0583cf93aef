"""Columns of a data set: which of them hold the question and the gold answer.

Column names are recognised (PROMPT_NAMES, SOLUTION_NAMES) or named by LEARNER_PROMPT_COLUMN and
LEARNER_SOLUTION_COLUMN. Dots reach into nested values: `reward_model.ground_truth`.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import DataError, MalformedMessage
from penstock.common.files.reading import parse_json
from penstock.common.text import short
from penstock.common.wire.limits import check_names, check_plain
from penstock.common.wire.plain import DEEPEST, brief
from penstock.common.wire.reward_spec import NEED_GOLD

PROMPT_NAMES = (
    "prompt", "question", "problem", "query", "instruction", "messages", "conversations",
    "conversation",
    "0.value",  # Open-Reasoner-Zero: a list of turns
)  # fmt: skip
SOLUTION_NAMES = (
    "final_answer", "answer", "solution", "ground_truth",  # the later ones may be derivations
    "reward_model.ground_truth",  # verl
    "label", "labels", "target",
    "1.ground_truth.value", "conversations.1.ground_truth.value",  # Open-Reasoner-Zero
    "response",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """Names of the columns that hold the question and the gold answer ("": there is none).

    `optional`: no reward needs a gold answer, so rows may lack theirs.
    """

    prompt: str
    solution: str
    optional: bool = False


def map_columns(
    names: Iterable[str], source: str, settings: LearnerSettings, row: Mapping[str, object]
) -> ColumnMapping:
    """Return which of the data set's columns `names` hold the question and the gold answer ("": none).

    These are prompt_column and solution_column if set, else the first known name that is there, in any
    case: `Answer` comes before `solution` as `answer` does. `source` names the data set in errors. Names
    with dots are looked up in `row`, any of its rows. Raise DataError if a column that is set, the
    question's, or the gold answer's if a built-in of settings.rewards needs it, is missing; if two such
    columns differ only in capitals; or if the question is in both `instruction` and `input`.
    """
    found = list(names)

    def has(name: str) -> bool:
        """Return whether there is a column `name`, or by dots a nested value of `row` but None."""
        return name in found or (name.partition(".")[0] in found and look_up(row, name) is not None)

    def first(usual: tuple[str, ...], variable: str) -> str:
        """Return the column for the first of `usual` (in small letters) there is, in any case, else "".

        Raise DataError for two that differ only in case; `variable` is the setting that chooses one.
        """
        for name in usual:
            alike = [other for other in found if other.lower() == name]
            if len(alike) > 1:
                choice = f"set {variable} to one of {', '.join(alike)}"
                raise DataError(f"{source}: {choice}, columns that differ only in capitals")
            if alike or has(name):
                return alike[0] if alike else name
        return ""

    def pick(named: str, usual: tuple[str, ...], variable: str) -> str:
        """Return `named`, or if "" the first of `usual` that is there. Raise DataError without one."""
        if chosen := first(usual, variable) if not named else named if has(named) else "":
            return chosen
        usual_ones = f"none of the columns {', '.join(usual)} is there"
        missing = f"column {named!r} is missing" if named else usual_ones
        there = f"it has {short(', '.join(found), 500)}. Set {variable} to one of these"
        raise DataError(f"{source}: {missing}; {there}.")

    prompt = pick(settings.prompt_column, PROMPT_NAMES, "LEARNER_PROMPT_COLUMN")
    if not settings.prompt_column:
        _check_is_whole(prompt, found, source)
    if not (settings.solution_column or NEED_GOLD & set(settings.rewards)):
        return ColumnMapping(prompt, first(SOLUTION_NAMES, "LEARNER_SOLUTION_COLUMN"), True)
    solution = pick(settings.solution_column, SOLUTION_NAMES, "LEARNER_SOLUTION_COLUMN")
    return ColumnMapping(prompt, solution)


def gold_columns(chosen: str) -> tuple[str, ...]:
    """Return, in lower case, the columns that may hold the gold answer: `chosen` or the usual ones ("").

    The outer columns of nested names, and conversations, which may end with the answer, are there too.
    """
    names = ("solution", chosen.lower()) if chosen else SOLUTION_NAMES
    outer = [name.partition(".")[0] for name in names]
    return (*names, *outer, "messages", "conversations", "conversation")


def _check_is_whole(prompt: str, names: Sequence[str], source: str) -> None:
    """Raise DataError if the question is in two of the columns `names`, `instruction` and `input`."""
    other = {name.lower(): name for name in names}.get("input")
    if other and prompt.lower() == "instruction":
        remedy = f"set LEARNER_PROMPT_COLUMN={prompt} to leave {other} out, or join them"
        raise DataError(f"{source}: the question is in two columns, {prompt} and {other}: {remedy}")


def look_up(row: Mapping[str, object], name: str) -> object:
    """Return the value of the column `name`, or a nested value by its dotted name; None if missing.

    A part of the name that is a number is the index of a list's item, from 0 on.
    Example:
        >>> look_up({"reward_model": {"ground_truth": "72"}}, "reward_model.ground_truth")
        '72'
    """
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


_JSON_MESSAGES = re.compile(r"\s*\[\s*\{\s*\"(?:role|content|from|value)\"\s*:")
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system",
}  # fmt: skip
"""Who speaks in a turn of ShareGPT's form, and the role of the message."""


def as_messages(prompt: object, where: str) -> object:
    """Return a conversation as a new list of messages with a role and a text; another prompt as it is.

    A conversation is a list of dictionaries, or a text that is such a list as JSON, as exports to CSV
    have it. A turn {"from": "human", "value": ..} becomes {"role": "user", "content": ..}. A content
    that is a list of parts {"type": "text", "text": ..} becomes their joined text. The argument is not
    changed. Raise DataError, which begins with `where`, for an unknown speaker, for a turn without value
    that is not the assistant's, and for a part that is no text, such as an image.
    """
    if isinstance(prompt, str) and _JSON_MESSAGES.match(prompt):
        with contextlib.suppress(ValueError):
            prompt = parse_json(prompt)
    if not (isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt)):
        return prompt
    return [_as_message(turn, where) for turn in prompt]


def _as_message(turn: dict[str, object], where: str) -> dict[str, object]:
    """Return a turn of a conversation as a message with role and content.

    A turn of ShareGPT's form (`from`, `value`, no `role`) and one whose content is a list of parts are
    converted to a new dictionary; any other turn is returned as it is. Parts become their joined text.
    Raise DataError, which begins with `where`, for a part that is no text, an unknown speaker, or a
    missing value of another speaker than the assistant.
    """
    if "from" in turn and turn.get("role") is None:
        turn = _from_sharegpt(turn, where)
    content = turn.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return turn
    return {**turn, "content": "".join(_text_of(part, where) for part in content)}


def _text_of(part: dict[str, object], where: str) -> str:
    """Return the text of a part of a message. Raise DataError, which begins with `where`, without one.

    A part has a text if its `type` is "text" or missing, and its `text` is one.
    """
    kind, text = part.get("type", "text"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    found = f"of type {brief(kind)}; expected text, as models of images or sound cannot be trained"
    if kind == "text":
        found = f"whose text is {'missing' if text is None else brief(text)}; expected a text"
    raise DataError(f"{where}: a message has a part {found}. Remove the row or the part")


def _from_sharegpt(turn: dict[str, object], where: str) -> dict[str, object]:
    """Return ShareGPT's turn, {"from": "human", "value": ..}, as {"role": "user", "content": ..}.

    If an assistant's value is missing or None, the content is "", because the policy writes the answer.
    Raise DataError, which begins with `where`, for an unknown speaker, or if another value is missing.
    """
    speaker, value = turn["from"], turn.get("value")
    role = _ROLES.get(speaker) if isinstance(speaker, str) else None
    remedy = "Correct or remove the turn, or write the conversation as messages with role and content"
    if role is None:
        expected = f"expected one of {', '.join(_ROLES)}"
        raise DataError(f"{where}: a turn is from {brief(speaker)}; {expected}. {remedy}")
    if value is None and role != "assistant":
        raise DataError(f"{where}: a turn from {speaker} has no value; expected a text. {remedy}")
    return {"role": role, "content": "" if value is None else value}


def without_answer(prompt: object) -> object:
    """Return a conversation without its last message if the assistant wrote it: the policy is to answer.

    A conversation of one message, one that ends with another role, and a prompt that is no list are
    returned as they are. The messages have been checked before: each has a role.
    """
    if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        return prompt[:-1]
    return prompt


def check_row(prompt: object, solution: object, mapping: ColumnMapping, where: str) -> None:
    """Raise DataError if the prompt is no question, or if a gold answer that `mapping` names is missing.

    A question is a text that is not blank, or a list of messages, of which one that is not the
    assistant's is not blank. `where` names the data set and the row in the error: `gsm8k.jsonl, row 3`.
    """
    if isinstance(prompt, list):
        usable = all(map(_is_message, prompt)) and any(map(_asks, prompt))
    else:
        usable = isinstance(prompt, str) and bool(prompt.strip())
    if not usable:
        raise DataError(
            f"{where}: {mapping.prompt} is {brief(prompt)}; expected a text, or a list of messages with "
            "a role and a text as content, one by the user. Correct the row, or LEARNER_PROMPT_COLUMN"
        )
    if mapping.solution and not mapping.optional and _is_missing(solution):
        found = "null" if solution is None else brief(solution)
        remedy = "Correct the row, or LEARNER_SOLUTION_COLUMN"
        raise DataError(f"{where}: {mapping.solution} is {found}; expected the gold answer. {remedy}")


def _is_message(found: object) -> bool:
    """Return whether `found` is a message: a dictionary whose `role` and `content` are texts."""
    return isinstance(found, dict) and all(
        isinstance(found.get(key), str) for key in ("role", "content")
    )


def _asks(message: dict[str, str]) -> bool:
    """Return whether the content of a message is not blank, and its role is not "assistant"."""
    return message["role"] != "assistant" and bool(message["content"].strip())


def _is_missing(gold: object) -> bool:
    """Return whether a gold answer is None, NaN, infinite, or a text that is blank or "nan" in any case.

    A list, tuple or dictionary is missing if all its values are, or if it is empty: [], [NaN],
    {"value": ""}.
    """
    if isinstance(gold, (list, tuple, dict)):
        return all(map(_is_missing, gold.values() if isinstance(gold, dict) else gold))
    if isinstance(gold, float):
        return not math.isfinite(gold)
    return gold is None or (isinstance(gold, str) and gold.strip().lower() in ("", "nan"))


def plain(value: object, levels: int = DEEPEST + 1) -> object:
    """Return a column's value in the types that a ticket can hold: plain values, lists and dictionaries.

    Dates, decimals and other types become text; None, numbers, texts and bytes stay. Dictionaries and
    lists are copied and converted item by item, tuples become lists, and keys become texts. A
    dictionary, list or tuple deeper than `levels` levels stays as it is; with 0 `value` itself does.
    """
    if levels and isinstance(value, dict):
        return {str(key): plain(item, levels - 1) for key, item in value.items()}
    if levels and isinstance(value, (list, tuple)):
        return [plain(item, levels - 1) for item in value]
    kept = (bool, int, float, str, bytes, dict, list, tuple)
    return value if value is None or isinstance(value, kept) else str(value)


def check_columns(columns: Mapping[str, object], where: str) -> None:
    """Raise DataError, which begins with `where`, for columns that no ticket can hold.

    These are over 1024 columns; a name of over 200 characters, or with half a character; and values that
    nest over 32 levels, have keys that are no texts, integers over 64 bits, half a character in a text,
    or other types than None, bool, int, float, str, bytes, list, tuple and dict.
    """
    try:
        check_names("column", columns)
        check_plain("column", columns)
    except MalformedMessage as error:
        remedy = "Correct the value, or remove the column from the data set"
        raise DataError(f"{where}: {error}. {remedy}") from error
