"""Questions: rows of a data set with the prompt rendered and measured in tokens.

Columns are recognised by their usual names, or named by LEARNER_PROMPT_COLUMN and
LEARNER_SOLUTION_COLUMN; the mapping is logged. Every column but the prompt rides on the ticket, for
the rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import DataError
from common.learner_settings import LearnerSettings
from common.log import get_logger

PROMPT_NAMES = ("prompt", "question", "problem", "messages", "query", "instruction")
SOLUTION_NAMES = ("solution", "answer", "ground_truth", "label", "labels", "target")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in tokens (P,) and the data set's other columns."""

    prompt_ids: np.ndarray
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which columns hold the question and the gold answer."""

    prompt: str
    solution: str


def load_questions(
    source: str, split: str, settings: LearnerSettings, tokenizer: Any, limit: int = 0
) -> tuple[list[Question], Mapping]:
    """Rows of `source` as questions, at most `limit` of them; raises DataError.

    Prompts over max_prompt_length are left out and counted.
    """
    rows = load_rows(source, split)
    mapping = map_columns(rows.column_names, source, settings)
    log.info("data set", source=source, rows=len(rows), prompt=mapping.prompt, solution=mapping.solution)
    questions, too_long = [], 0
    for number, row in enumerate(rows if not limit else rows.select(range(min(limit, len(rows)))), 1):
        check_row(row, mapping, f"{source}, row {number}")
        ids = render_prompt(row[mapping.prompt], settings, tokenizer)
        if len(ids) > settings.max_prompt_length:
            too_long += 1
            continue
        columns = {name: value for name, value in row.items() if name != mapping.prompt}
        questions.append(Question(np.array(ids, dtype="<i4"), columns))
    if too_long:
        log.warning("prompts over LEARNER_MAX_PROMPT_LENGTH were left out", count=too_long)
    if not questions:
        raise DataError(f"{source}: no question left of {len(rows)} rows")
    return questions, mapping


def load_rows(source: str, split: str) -> Any:
    """A `datasets.Dataset` from a local JSONL file or a hub id; raises DataError."""
    import datasets

    datasets.disable_progress_bars()
    path = Path(source)
    if path.suffix in (".jsonl", ".json"):
        if not path.is_file():
            raise DataError(f"{source}: no such file")
        # Not Dataset.from_json: it makes dates of texts that look like dates.
        rows = read_lines(path)
        try:
            return datasets.Dataset.from_list(rows)
        except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are ValueErrors
            raise DataError(f"{source}: a column mixes kinds of values: {error}") from error
    try:
        return datasets.load_dataset(source, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{source} (split {split}): cannot be loaded: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows; raises DataError naming the first line that is no object or lacks a column."""
    columns: set[str] | None = None
    rows = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not readable as JSON ({error}): {line.strip()[:60]!r}"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object, found {line[:60]!r}")
            columns = set(row) if columns is None else columns
            if missing := columns - set(row):
                raise DataError(
                    f"{path}, line {number}: lacks {', '.join(sorted(missing))}, which line 1 has"
                )
            rows.append(row)
    if columns is None:
        raise DataError(f"{path} is empty")
    return rows


def map_columns(names: Iterable[str], source: str, settings: LearnerSettings) -> Mapping:
    """Find the prompt's and the solution's column; raises DataError naming what is there."""
    found = list(names)

    def pick(asked: str, usual: tuple[str, ...], variable: str) -> str:
        candidates = [asked] if asked else [name for name in usual if name in found]
        if candidates and candidates[0] in found:
            return candidates[0]
        wanted = f"column {asked!r}" if asked else f"none of the columns {', '.join(usual)}"
        verb = "is missing" if asked else "is there"
        raise DataError(f"{source}: {wanted} {verb}; it has {', '.join(found)}. Set {variable}.")

    return Mapping(
        pick(settings.prompt_column, PROMPT_NAMES, "LEARNER_PROMPT_COLUMN"),
        pick(settings.solution_column, SOLUTION_NAMES, "LEARNER_SOLUTION_COLUMN"),
    )


def check_row(row: dict[str, Any], mapping: Mapping, where: str) -> None:
    """A prompt is a text or a list of messages, a solution is anything but nothing; raises DataError."""
    prompt = row[mapping.prompt]
    is_text = isinstance(prompt, str) and bool(prompt.strip())
    is_messages = (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in prompt)
    )
    if not (is_text or is_messages):
        raise DataError(
            f"{where}: {mapping.prompt} is {prompt!r}; expected a text, or messages with role and "
            "content"
        )
    if row[mapping.solution] is None:
        raise DataError(f"{where}: {mapping.solution} is null")


def render_prompt(prompt: Any, settings: LearnerSettings, tokenizer: Any) -> list[int]:
    """Token ids of a question: by the tokenizer's chat template if it has one, else as it stands."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
    if settings.system_prompt:
        messages = [{"role": "system", "content": settings.system_prompt}, *messages]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if settings.prompt_template == "chat" and not has_template:
        raise DataError("LEARNER_PROMPT_TEMPLATE=chat, but the model's tokenizer has no chat template")
    if has_template and settings.prompt_template != "none":
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer("\n".join(message["content"] for message in messages)).input_ids
