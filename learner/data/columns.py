"""Columns of a data set: which of them hold the question and the gold answer.

Column names are recognised (PROMPT_NAMES, SOLUTION_NAMES) or named by LEARNER_PROMPT_COLUMN and
LEARNER_SOLUTION_COLUMN. Dots reach into nested values: `reward_model.ground_truth`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import DataError
from penstock.common.wire.reward_spec import NEED_GOLD

PROMPT_NAMES = (
    "prompt", "question", "problem", "query", "instruction", "messages",
    "0.value",  # Open-Reasoner-Zero: a list of turns
)  # fmt: skip
SOLUTION_NAMES = (
    "solution", "answer", "ground_truth",
    "reward_model.ground_truth",  # verl
    "label", "labels", "target",
    "1.ground_truth.value",  # Open-Reasoner-Zero
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """Which columns hold the question and the gold answer ("" if no reward needs one)."""

    prompt: str
    solution: str


def map_columns(
    names: Iterable[str], source: str, settings: LearnerSettings, row: dict[str, Any]
) -> ColumnMapping:
    """Find the prompt's and the solution's column; raises DataError naming what is there.

    `row` is any row: nested names are looked up in it.
    """
    found = list(names)

    def has(name: str) -> bool:
        return name in found or (
            name.split(".", maxsplit=1)[0] in found and look_up(row, name) is not None
        )

    def pick(asked: str, usual: tuple[str, ...], variable: str) -> str:
        candidates = [asked] if asked else [name for name in usual if has(name)]
        if candidates and has(candidates[0]):
            return candidates[0]
        wanted = f"column {asked!r}" if asked else f"none of the columns {', '.join(usual)}"
        verb = "is missing" if asked else "is there"
        raise DataError(f"{source}: {wanted} {verb}; it has {', '.join(found)}. Set {variable}.")

    prompt = pick(settings.prompt_column, PROMPT_NAMES, "LEARNER_PROMPT_COLUMN")
    if not (settings.solution_column or NEED_GOLD & set(settings.reward_names)):
        return ColumnMapping(prompt, next(filter(has, SOLUTION_NAMES), ""))
    return ColumnMapping(
        prompt, pick(settings.solution_column, SOLUTION_NAMES, "LEARNER_SOLUTION_COLUMN")
    )


def look_up(row: dict[str, Any], name: str) -> Any:
    """A column, or by dots what lies in it; None if it is not there.

    Example:
        >>> look_up({"reward_model": {"ground_truth": "72"}}, "reward_model.ground_truth")
        '72'
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return None
    return value


def without_answer(prompt: Any) -> Any:
    """A conversation without the assistant's last turn, which the policy is to write."""
    if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        return prompt[:-1]
    return prompt


def check_row(prompt: Any, solution: Any, mapping: ColumnMapping, where: str) -> None:
    """A prompt is a text or a list of messages, a solution is anything but nothing; raises DataError."""
    is_text = isinstance(prompt, str) and bool(prompt.strip())
    is_messages = (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, dict) and "role" in message and isinstance(message.get("content"), str)
            for message in prompt
        )
    )
    if not (is_text or is_messages):
        raise DataError(
            f"{where}: {mapping.prompt} is {prompt!r}; expected a text, or messages with role and "
            "content, which is a text"
        )
    if mapping.solution and solution is None:
        raise DataError(f"{where}: {mapping.solution} is null")


def plain(value: Any) -> Any:
    """A column's value as a ticket can hold it: dates, decimals and the like as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, bytes)) else str(value)
