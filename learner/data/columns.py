"""Questions from data sets: which columns hold what, what is left out, in which order they are asked.

Column names are recognised (PROMPT_NAMES, SOLUTION_NAMES) or named by LEARNER_PROMPT_COLUMN and
LEARNER_SOLUTION_COLUMN; dots reach into nested values; the mapping is logged. Every column rides on the
ticket, for the rewards; the question and the gold answer under the names `prompt` and `solution` too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, DataError
from penstock.common.log import get_logger
from penstock.common.wire.reward_spec import NEED_GOLD
from penstock.learner.data.order import Question, Questions, Shuffled, Streamed
from penstock.learner.data.sources import Source, load_rows, stream_rows
from penstock.learner.data.templates import Template

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

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which columns hold the question and the gold answer ("" if no reward needs one)."""

    prompt: str
    solution: str


class Reader:
    """Makes questions of rows, and counts what it leaves out or cuts."""

    def __init__(self, settings: LearnerSettings, tokenizer: Any) -> None:
        self.too_long = 0
        self._settings = settings
        self._template = Template(settings, tokenizer)

    def read(self, row: dict[str, Any], mapping: Mapping, where: str) -> Question | None:
        """The question of a row, None if its prompt is too long; raises DataError."""
        prompt = look_up(row, mapping.prompt)
        solution = look_up(row, mapping.solution) if mapping.solution else None
        check_row(prompt, solution, mapping, where)
        prompt = without_answer(prompt)
        ids = self._template.render(prompt)
        limit = self._settings.max_prompt_length
        if len(ids) > limit:
            self.too_long += 1
            if self._settings.overlong_prompts == "drop":
                return None
            ids = ids[-limit:]  # the end holds the question, and where the answer begins
        columns = plain(row) | {"prompt": prompt}
        if mapping.solution:
            columns["solution"] = plain(solution)
        return Question(np.array(ids, dtype="<i4"), columns)

    def report(self) -> None:
        """Say how many prompts were too long."""
        if self.too_long:
            done = "left out" if self._settings.overlong_prompts == "drop" else "cut at their beginning"
            log.warning(f"prompts over LEARNER_MAX_PROMPT_LENGTH were {done}", count=self.too_long)


def plain(value: Any) -> Any:
    """A column's value as a ticket can hold it: dates, decimals and the like as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, bytes)) else str(value)


def load_questions(settings: LearnerSettings, tokenizer: Any) -> tuple[Questions, list[Question]]:
    """What is trained on, and what is held out; raises DataError, ConfigError."""
    reader = Reader(settings, tokenizer)
    sources = [Source.parse(name) for name in settings.dataset or settings.eval_dataset]
    held_out = [
        question
        for name in settings.eval_dataset
        for question in read_questions(Source.parse(name), settings.eval_split, settings, reader)
    ]
    if settings.dataset_streaming:
        questions: Questions = open_stream(sources, settings, reader)
    else:
        split = settings.dataset_split if settings.dataset else settings.eval_split
        sets = [read_questions(one, split, settings, reader) for one in sources]
        if settings.eval_holdout:
            sets, held_out = hold_out(sets, settings)
        questions = Shuffled(sets, settings.dataset_weights, settings.seed, settings.dataset_shuffle)
    reader.report()
    return questions, held_out[: settings.eval_samples or None]


def read_questions(
    source: Source, split: str, settings: LearnerSettings, reader: Reader
) -> list[Question]:
    """All questions of a data set; raises DataError."""
    rows = load_rows(source, split, settings.seed)
    mapping = map_columns(rows.column_names, source.name, settings, rows[0] if len(rows) else {})
    log.info(
        "data set", source=source.name, rows=len(rows), prompt=mapping.prompt, solution=mapping.solution
    )
    found = (
        reader.read(row, mapping, f"{source.name}, row {number}") for number, row in enumerate(rows, 1)
    )
    questions = [question for question in found if question is not None]
    if not questions:
        raise DataError(
            f"{source.name}: no question left of {len(rows)} rows; all were longer than "
            f"LEARNER_MAX_PROMPT_LENGTH={settings.max_prompt_length} tokens"
        )
    return questions


def hold_out(
    sets: list[list[Question]], settings: LearnerSettings
) -> tuple[list[list[Question]], list[Question]]:
    """Set questions aside by the seed: a share (below 1) or a number of them; raises ConfigError."""
    total = sum(map(len, sets))
    asked = settings.eval_holdout
    if asked > 1 and not asked.is_integer():
        raise ConfigError(f"LEARNER_EVAL_HOLDOUT={asked:g}: expected a share below 1, or a whole number")
    count = round(asked * total) if asked < 1 else int(asked)
    if not 0 < count < total:
        raise ConfigError(f"LEARNER_EVAL_HOLDOUT={asked:g} of {total} questions leaves none on one side")
    places = [(which, index) for which, one in enumerate(sets) for index in range(len(one))]
    order = np.random.default_rng([settings.seed, total]).permutation(total)
    chosen = {places[position] for position in order[:count]}
    kept = [
        [question for index, question in enumerate(one) if (which, index) not in chosen]
        for which, one in enumerate(sets)
    ]
    if not all(kept):
        raise ConfigError(f"LEARNER_EVAL_HOLDOUT={asked:g} leaves nothing of one of the data sets")
    return kept, [sets[which][index] for which, index in sorted(chosen)]


def open_stream(sources: list[Source], settings: LearnerSettings, reader: Reader) -> Streamed:
    """Questions as they are needed; raises DataError, ConfigError."""
    if len(sources) > 1 or settings.eval_holdout or not settings.max_steps:
        raise ConfigError(
            "LEARNER_DATASET_STREAMING needs one data set, LEARNER_MAX_STEPS, and no "
            "LEARNER_EVAL_HOLDOUT: how many questions there are is not known beforehand"
        )
    (source,) = sources

    def open_epoch(epoch: int) -> Iterable[Question]:
        seed = settings.seed + epoch if settings.dataset_shuffle else None
        mapping: Mapping | None = None
        for number, row in enumerate(stream_rows(source, settings.dataset_split, seed), 1):
            if mapping is None:
                mapping = map_columns(row, source.name, settings, row)
            question = reader.read(row, mapping, f"{source.name}, row {number}")
            if question is not None:
                yield question

    questions = Streamed(open_epoch, source.name)
    questions.at(0)  # what cannot be read is told now, not when the first ticket is made
    return questions


def map_columns(
    names: Iterable[str], source: str, settings: LearnerSettings, row: dict[str, Any]
) -> Mapping:
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
        return Mapping(prompt, next(filter(has, SOLUTION_NAMES), ""))
    return Mapping(prompt, pick(settings.solution_column, SOLUTION_NAMES, "LEARNER_SOLUTION_COLUMN"))


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


def check_row(prompt: Any, solution: Any, mapping: Mapping, where: str) -> None:
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
