"""Questions of a run: rows of its data sets, each with a prompt in tokens, trained on or held out.

A ticket carries every column of its row, for the rewards. The question and the gold answer are also
there under the names `prompt` and `solution`.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, compress

import numpy as np
from blake3 import blake3

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

_MOST_FAULTS = 5  # bad rows of a data set that one error names


class QuestionReader:
    """Converts the rows of data sets to questions.

    `template` makes a row's prompt, and shows the model those tools of `episodes` that the row has; with
    None a prompt has no tokens.
    `settings` limit the length of a prompt (max_prompt_length), and say whether a longer one is dropped
    or cut (overlong_prompts). The attribute `too_long` counts the longer prompts, from 0, and `unknown`
    those with letters that the tokenizer has no token for; `longest` has the tokens of the longest.
    """

    def __init__(
        self, settings: LearnerSettings, template: Template | None, episodes: EpisodeSpec
    ) -> None:
        self.too_long = self.unknown = self.longest = 0
        self._settings = settings
        self._template = template
        self._unknown_id = template.unknown_id if template else None
        self._episodes = episodes

    def read(self, row: Mapping[str, object], mapping: ColumnMapping, where: str) -> Question | None:
        """Return the question of a row: its prompt as token ids, and its columns as plain values.

        `row` has the values by column, and `mapping` names the columns of question and gold answer. The
        columns get `prompt`, without an answer at its end, and, if a gold answer is mapped, `solution`.
        A prompt over max_prompt_length tokens is counted in `too_long`. With overlong_prompts=drop
        return None for it, else keep its last tokens. Raise DataError, which begins with `where`, such
        as "gsm8k.jsonl, row 3", if the row has no usable question or mapped gold answer, what no ticket
        can hold, such as a prompt without tokens, or no known environment. Raise ConfigError, which
        begins with `where` too, if the chat template rejects the row.
        """
        columns = {str(name): plain(value) for name, value in row.items()}
        prompt = look_up(columns, mapping.prompt)
        solution = look_up(columns, mapping.solution) if mapping.solution else None
        columns["prompt"] = prompt = as_messages(prompt, where)
        if mapping.solution:
            columns["solution"] = solution
        check_columns(columns, where)  # before anything recurses into a value
        check_row(prompt, solution, mapping, where)
        columns["prompt"] = prompt = without_answer(prompt)
        try:
            tools = self._episodes.tools_of(columns)
        except ValueError as error:
            raise DataError(f"{where}: {error}. Correct this row, or LEARNER_ENVIRONMENT") from error
        try:
            ids = self._template.render(prompt, tools) if self._template else []
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if self._template and not ids:
            remedy = "Correct the row, or LEARNER_PROMPT_TEMPLATE"
            raise DataError(f"{where}: the prompt has no token, expected at least one. {remedy}")
        self.unknown += self._unknown_id in ids
        limit, self.longest = self._settings.max_prompt_length, max(self.longest, len(ids))
        if len(ids) > limit:
            self.too_long += 1
            if self._settings.overlong_prompts == "drop":
                return None
            ids = ids[-limit:]  # the end has the question, and the marker after which the answer begins
        return Question(np.array(ids, dtype="<i4"), columns, where)


def load_questions(
    settings: LearnerSettings, template: Template, episodes: EpisodeSpec | None = None
) -> tuple[Questions, list[Question]]:
    """Return the questions to train on, and a list of those held out, at most eval_samples (0: all).

    Held out are the questions of LEARNER_EVAL_DATASET, or those that LEARNER_EVAL_HOLDOUT draws from the
    others. Without LEARNER_DATASET the questions of LEARNER_EVAL_DATASET are in both results. With
    dataset_streaming the first result reads rows when they are needed. `template` makes the prompts, and
    shows the tools of `episodes`; None: no tools. Log how many prompts are too long, have unknown
    letters, or are held out and trained. Raise DataError if a data set cannot be read or has a bad row,
    ConfigError if the settings or the chat template do not fit.
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
    held_out = held_out[: settings.eval_samples or None]
    _report_prompts(reader, settings)
    if settings.dataset and not (settings.evaluate_only or settings.has_episodes):
        _report_repeated(questions, held_out)
    return questions, held_out


def _report_prompts(reader: QuestionReader, settings: LearnerSettings) -> None:
    """Log how many prompts were too long, and how many have letters that the model cannot see."""
    if reader.unknown:
        log.warning(
            f"{reader.unknown} prompts have letters that the model's tokenizer does not know: the model "
            "sees one <unk> for all of them. `penstock check` shows prompts as the model gets them."
        )
    if reader.too_long:
        done = "left out" if settings.overlong_prompts == "drop" else "cut at their beginning"
        log.warning(
            f"{reader.too_long} prompts are longer than LEARNER_MAX_PROMPT_LENGTH="
            f"{settings.max_prompt_length} tokens and were {done}: the longest has {reader.longest}."
        )


def _report_repeated(questions: Questions, held_out: list[Question]) -> None:
    """Log how many held-out prompts are trained too, and three of them. Of a stream this is unknown."""
    held = {one.prompt_ids.tobytes(): one.where for one in held_out}
    known = questions if held and len(questions) else ()
    both = {where: one.where for one in known if (where := held.get(one.prompt_ids.tobytes()))}
    if both:
        such = ", ".join(f"{where} ({trained})" for where, trained in list(both.items())[:3])
        found = f"{len(both)} of {len(held_out)} held-out questions are trained too, and measure memory"
        log.warning(f"{found}, such as {such}. Take them out of one of the data sets.")


def read_questions(
    source: Source, split: str, settings: LearnerSettings, reader: QuestionReader
) -> list[Question]:
    """Return the questions of a data set, in the order of its rows. Log the columns and the progress.

    `split` names the part of a hub id or saved folder. `reader` makes a row a question, or leaves it out
    because its prompt is too long. Raise DataError if the data set cannot be read, has no row or bad
    rows (it names five), or no prompt is short enough, ConfigError if the chat template rejects a row.
    """
    rows, numbers = load_rows(source, split, settings.seed)
    if not len(rows):
        remedy = "Name another one in LEARNER_DATASET or LEARNER_EVAL_DATASET"
        raise DataError(f"{source.name}: the data set has no rows, expected at least one. {remedy}.")
    names = list(rows[0])
    mapping = map_columns(names, source.name, settings, rows[0])
    gold = f"the gold answer is in {mapping.solution}" if mapping.solution else "there is no gold answer"
    log.info(f"Data set {source.name}: {len(rows)} rows; the question is in {mapping.prompt}, {gold}.")
    if "solution" in names and mapping.solution not in ("", "solution"):
        chosen = f"The rewards get {mapping.solution} as `solution`"
        log.info(f"{chosen}; LEARNER_SOLUTION_COLUMN=solution chooses the other.")
    questions, faults = list[Question](), list[str]()
    progress = f"{source.name}: rows read"
    for number, row in zip(numbers, with_progress(rows, progress, len(rows)), strict=True):
        try:
            if question := reader.read(row, mapping, f"{source.name}, row {number}"):
                questions.append(question)
        except DataError as error:
            faults.append(str(error))
            if len(faults) == _MOST_FAULTS:
                break
    if faults:
        raise DataError("\n".join(faults))
    if not questions:
        raise DataError(
            f"{source.name}: none of the {len(rows)} prompts has at most LEARNER_MAX_PROMPT_LENGTH="
            f"{settings.max_prompt_length} tokens, expected at least one. Raise this limit (the longest "
            f"has {reader.longest}), or set LEARNER_OVERLONG_PROMPTS=truncate."
        )
    return questions


def hold_out(
    sets: list[list[Question]], settings: LearnerSettings
) -> tuple[list[list[Question]], list[Question]]:
    """Return new lists: each data set without its held-out questions, and all held-out questions.

    `sets` has the questions of each data set, and is not changed. Questions keep their order.
    LEARNER_EVAL_HOLDOUT is a share below 1 (0.25), or from 1 on a number (30), of all questions;
    settings.seed draws which, by their content: added rows move few others, and equal rows stay
    together, so that a few less may be held out. Raise ConfigError if LEARNER_EVAL_HOLDOUT is neither
    (1.5), would hold out none or all of the questions, or leaves a data set without a question.
    """
    total = sum(map(len, sets))
    wanted = settings.eval_holdout
    if wanted > 1 and not wanted.is_integer():
        expected = "expected a share below 1, such as 0.25, or a whole number of questions, such as 30"
        raise ConfigError(f"LEARNER_EVAL_HOLDOUT={wanted:g}: {expected}: change it to one of these")
    count = round(wanted * total) if wanted < 1 else int(wanted)
    if not 0 < count < total:
        raise ConfigError(
            f"LEARNER_EVAL_HOLDOUT={wanted:g} would hold out {count} of {total} questions: expected at "
            "least one to train on and at least one held out. Choose another share or number."
        )
    chosen = np.zeros(total, bool)
    seed = str(settings.seed).encode()
    drawn_by = [blake3(seed + repr(one.columns).encode()).digest() for one in chain(*sets)]
    order = sorted(range(total), key=drawn_by.__getitem__)
    cut = count
    while cut and drawn_by[order[cut]] == drawn_by[order[cut - 1]]:  # between equal rows
        cut -= 1
    chosen[order[: cut or count]] = True
    drawn = np.split(chosen, np.cumsum([len(one) for one in sets])[:-1])
    kept = [list(compress(one, ~held)) for one, held in zip(sets, drawn, strict=True)]
    if not all(kept):
        raise ConfigError(
            f"LEARNER_EVAL_HOLDOUT={wanted:g} holds out every question of one of the data sets; "
            "expected at least one question left in each: choose less, or name the held-out questions "
            "by LEARNER_EVAL_DATASET"
        )
    return kept, list(compress(chain(*sets), chosen))


def open_stream(sources: list[Source], settings: LearnerSettings, reader: QuestionReader) -> Streamed:
    """Return the questions of the one data set in `sources`, whose rows are read when they are needed.

    `reader` makes a row a question, or leaves it out because its prompt is too long. The columns are
    chosen by the first row. The first question is read at once, so that an unreadable data set raises
    DataError before the run starts. Raise ConfigError if there are several sources, if eval_holdout is
    set or max_steps is not (these need the number of questions), or if the template rejects a row.
    """
    if len(sources) > 1 or settings.eval_holdout or not settings.max_steps:
        raise ConfigError(
            f"LEARNER_DATASET_STREAMING: found {len(sources)} data sets, LEARNER_MAX_STEPS="
            f"{settings.max_steps} and LEARNER_EVAL_HOLDOUT={settings.eval_holdout:g}; expected exactly "
            "one data set, a number of steps and no holdout (0), because the number of questions in a "
            "stream is not known beforehand. Change these, or set LEARNER_DATASET_STREAMING=false"
        )
    (source,) = sources
    rows = stream_rows(source, settings.dataset_split, None)
    mapping = next((map_columns(row, source.name, settings, row) for row in rows), None)

    def open_epoch(epoch: int) -> Iterable[Question]:
        """Yield the questions of an epoch, counted from 0, reading the data set from its beginning.

        With dataset_shuffle the rows are shuffled by settings.seed + `epoch`. Rows that the reader
        leaves out are skipped. Raise DataError for an unreadable data set or a bad row, ConfigError if
        the chat template rejects a row.
        """
        seed = settings.seed + epoch if settings.dataset_shuffle else None
        order = " as shuffled" if settings.dataset_shuffle else ""
        for number, row in enumerate(stream_rows(source, settings.dataset_split, seed), 1):
            assert mapping  # there is a first row
            question = reader.read(row, mapping, f"{source.name}, row {number}{order}")
            if question is not None:
                yield question

    questions = Streamed(open_epoch, source.name)
    questions.at(0)
    return questions
