"""Questions of a run: rows of its data sets, each with a prompt in tokens, trained on or held out.

Every column rides on the ticket, for the rewards. The question and the gold answer are also there under
the names `prompt` and `solution`.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, compress

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, DataError
from penstock.common.log import get_logger
from penstock.common.progress import with_progress
from penstock.common.wire.episode_spec import EpisodeSpec
from penstock.learner.data.columns import (
    ColumnMapping,
    as_messages,
    check_columns,
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


class QuestionReader:
    """Converts rows to questions, whose chat templates show the tools of `episodes`.

    `too_long` counts long prompts. Raise ConfigError as Template does.
    """

    def __init__(self, settings: LearnerSettings, template: Template, episodes: EpisodeSpec) -> None:
        self.too_long = 0
        self._settings = settings
        self._template = template
        self._episodes = episodes

    def read(self, row: Mapping[str, object], mapping: ColumnMapping, where: str) -> Question | None:
        """Return the question of a row; count a long prompt in `too_long`, and drop (None) or cut it.

        Raise DataError, which begins with `where`, if the row has no usable question or gold answer,
        and ConfigError if the chat template rejects the question.
        """
        columns = {str(name): plain(value) for name, value in row.items()}
        prompt = look_up(columns, mapping.prompt)
        solution = look_up(columns, mapping.solution) if mapping.solution else None
        check_columns(columns, where)  # before anything recurses into a value
        prompt = as_messages(prompt, where)
        check_row(prompt, solution, mapping, where)
        prompt = without_answer(prompt)
        try:
            tools = self._episodes.tools_of(columns)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        ids = self._template.render(prompt, tools)
        limit = self._settings.max_prompt_length
        if len(ids) > limit:
            self.too_long += 1
            if self._settings.overlong_prompts == "drop":
                return None
            ids = ids[-limit:]  # the end has the question, and the marker after which the answer begins
        columns["prompt"] = prompt
        if mapping.solution:
            columns["solution"] = solution
        return Question(np.array(ids, dtype="<i4"), columns, where)


def load_questions(
    settings: LearnerSettings, template: Template, episodes: EpisodeSpec | None = None
) -> tuple[Questions, list[Question]]:
    """Return the questions to train on, and up to eval_samples held out. Log how many are too long.

    `template` makes the prompts, with the tools of `episodes`, if any.

    Raise DataError if a data set cannot be read, ConfigError if the settings or a template do not fit.
    """
    reader = QuestionReader(settings, template, episodes or EpisodeSpec())
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
        sets = [read_questions(source, split, settings, reader) for source in sources]
        if settings.eval_holdout:
            sets, held_out = hold_out(sets, settings)
        questions = Shuffled(sets, settings.dataset_weights, settings.seed, settings.dataset_shuffle)
    if reader.too_long:
        done = "left out" if settings.overlong_prompts == "drop" else "cut at their beginning"
        log.warning(
            f"{reader.too_long} prompts are longer than LEARNER_MAX_PROMPT_LENGTH="
            f"{settings.max_prompt_length} tokens and were {done}."
        )
    return questions, held_out[: settings.eval_samples or None]


def read_questions(
    source: Source, split: str, settings: LearnerSettings, reader: QuestionReader
) -> list[Question]:
    """Return all questions of a data set. Log its columns.

    Raise DataError if it cannot be read or no prompt is short enough, ConfigError if the template fails.
    """
    rows, numbers = load_rows(source, split, settings.seed)
    mapping = map_columns(rows.column_names, source.name, settings, rows[0] if len(rows) else {})
    gold = f"the gold answer is in {mapping.solution}" if mapping.solution else "there is no gold answer"
    log.info(f"Data set {source.name}: {len(rows)} rows; the question is in {mapping.prompt}, {gold}.")
    if "solution" in rows.column_names and mapping.solution not in ("", "solution"):
        chosen = f"The rewards get {mapping.solution} as `solution`"
        log.info(f"{chosen}; LEARNER_SOLUTION_COLUMN=solution chooses the other.")
    progress = f"{source.name}: rows read"
    found = (
        reader.read(row, mapping, f"{source.name}, row {number}")
        for number, row in zip(numbers, with_progress(rows, progress, len(rows)), strict=True)
    )
    questions = [question for question in found if question is not None]
    if not len(rows):
        raise DataError(f"{source.name}: no rows. Correct LEARNER_DATASET or LEARNER_EVAL_DATASET.")
    if not questions:
        raise DataError(
            f"{source.name}: none of the {len(rows)} prompts has at most LEARNER_MAX_PROMPT_LENGTH="
            f"{settings.max_prompt_length} tokens. Raise it, or set LEARNER_OVERLONG_PROMPTS=truncate."
        )
    return questions


def hold_out(
    sets: list[list[Question]], settings: LearnerSettings
) -> tuple[list[list[Question]], list[Question]]:
    """Return the data sets without the held-out questions, and the held-out questions.

    LEARNER_EVAL_HOLDOUT is a share (0.25) or a number (30) of questions; the seed draws which. Raise
    ConfigError if LEARNER_EVAL_HOLDOUT is neither, or leaves no question on one side or in a data set.
    """
    total = sum(map(len, sets))
    wanted = settings.eval_holdout
    if wanted > 1 and not wanted.is_integer():
        raise ConfigError(f"LEARNER_EVAL_HOLDOUT={wanted:g}: expected a share below 1 or a whole number")
    count = round(wanted * total) if wanted < 1 else int(wanted)
    if not 0 < count < total:
        raise ConfigError(
            f"LEARNER_EVAL_HOLDOUT={wanted:g} would hold out {count} of {total} questions: expected at "
            "least one to train on and at least one held out. Choose another share or number."
        )
    chosen = np.zeros(total, bool)
    chosen[np.random.default_rng([settings.seed, total]).permutation(total)[:count]] = True
    drawn = np.split(chosen, np.cumsum([len(one) for one in sets])[:-1])
    kept = [list(compress(one, ~held)) for one, held in zip(sets, drawn, strict=True)]
    if not all(kept):
        raise ConfigError(
            f"LEARNER_EVAL_HOLDOUT={wanted:g} holds out every question of one of the data sets: choose "
            "less, or name the held-out questions by LEARNER_EVAL_DATASET"
        )
    return kept, list(compress(chain(*sets), chosen))


def open_stream(sources: list[Source], settings: LearnerSettings, reader: QuestionReader) -> Streamed:
    """Return the questions of one data set, read while they are needed.

    The first question is read at once, so that an unreadable data set raises DataError before the run
    starts. Raise ConfigError if the settings need the number of questions, or if the template fails.
    """
    if len(sources) > 1 or settings.eval_holdout or not settings.max_steps:
        raise ConfigError(
            "LEARNER_DATASET_STREAMING needs exactly one data set, LEARNER_MAX_STEPS, and no "
            "LEARNER_EVAL_HOLDOUT: the number of questions in a stream is not known beforehand"
        )
    (source,) = sources

    def open_epoch(epoch: int) -> Iterable[Question]:
        """Yield an epoch's questions. Raise DataError or ConfigError as QuestionReader.read does."""
        seed = settings.seed + epoch if settings.dataset_shuffle else None
        order = " as shuffled" if settings.dataset_shuffle else ""
        mapping: ColumnMapping | None = None
        for number, row in enumerate(stream_rows(source, settings.dataset_split, seed), 1):
            if mapping is None:
                mapping = map_columns(row, source.name, settings, row)
            question = reader.read(row, mapping, f"{source.name}, row {number}{order}")
            if question is not None:
                yield question

    questions = Streamed(open_epoch, source.name)
    questions.at(0)
    return questions
