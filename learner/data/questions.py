"""Questions of a run: rows of its data sets, each with a prompt in tokens, trained on or held out.

Every column rides on the ticket, for the rewards. The question and the gold answer are also there under
the names `prompt` and `solution`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, DataError
from penstock.common.log import get_logger
from penstock.learner.data.columns import (
    ColumnMapping,
    check_row,
    look_up,
    map_columns,
    plain,
    without_answer,
)
from penstock.learner.data.order import Question, Questions, Shuffled, Streamed
from penstock.learner.data.sources import Source, load_rows, stream_rows
from penstock.learner.data.templates import Template

log = get_logger(__name__)


class Reader:
    """Makes questions of rows, and counts what it leaves out or cuts."""

    def __init__(self, settings: LearnerSettings, tokenizer: Any) -> None:
        self.too_long = 0
        self._settings = settings
        self._template = Template(settings, tokenizer)

    def read(self, row: dict[str, Any], mapping: ColumnMapping, where: str) -> Question | None:
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
        mapping: ColumnMapping | None = None
        for number, row in enumerate(stream_rows(source, settings.dataset_split, seed), 1):
            if mapping is None:
                mapping = map_columns(row, source.name, settings, row)
            question = reader.read(row, mapping, f"{source.name}, row {number}")
            if question is not None:
                yield question

    questions = Streamed(open_epoch, source.name)
    questions.at(0)  # what cannot be read is told now, not when the first ticket is made
    return questions
