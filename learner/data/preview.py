"""What `learner --dry-run --json` prints: a run before it starts, for `rewarder --check`.

One JSON object per line: {"contract": ..}, then {"row": ..} for the rows to show, then {"gold": ..} for
the gold answers. Nothing here calls a reward. With --rewards-alone no model is needed.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, DataError
from penstock.common.text import as_text
from penstock.common.wire.episode_spec import EpisodeSpec
from penstock.common.wire.reward_spec import NEED_GOLD, RewardSpec
from penstock.learner.data.columns import map_columns
from penstock.learner.data.order import Question
from penstock.learner.data.plan import Plan, describe, make_plan, read_model, shared_columns
from penstock.learner.data.questions import QuestionReader
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.learner.data.sources import Source, load_rows, stream_rows

STREAM_ROWS = 10_000
"""Questions of a stream that are read. A stream may have no end."""


def preview(
    settings: LearnerSettings, rows: int, check: Callable[[Plan], None]
) -> Iterator[dict[str, Any]]:
    """Yield the objects that `learner --dry-run --json` prints as lines, for a run with these settings.

    `check` is given the plan first, and raises ConfigError for one that a start would refuse.
    First comes {"contract": {"rewards", "figures", "episodes": whether there are any}}, then for the
    first `rows` questions, those to train on before those held out, {"row": {"where", "prompt" as text,
    "tokens": their number, "columns"}}. If a built-in reward needs gold answers, {"gold": [where, answer
    or None]} follows for each question (of a stream 10,000). Raise ConfigError for settings, model or
    code, and what `check` raises, DataError for an unusable data set.
    """
    check(plan := make_plan(settings))
    yield _contract(plan.contract.rewards, describe(settings, plan), settings)
    tokenizer, _ = read_model(plan.model_folder, settings.trust_remote_code)
    for question in islice(_questions(plan, settings), rows):
        ids = question.prompt_ids
        shown = {"where": question.where, "prompt": tokenizer.decode(ids), "tokens": len(ids)}
        yield {"row": {**shown, "columns": question.columns}}
    if not NEED_GOLD.isdisjoint(spec.name for spec in plan.contract.rewards if not spec.source):
        for question in _questions(plan, settings):
            yield {"gold": [question.where, question.columns.get("solution")]}


def preview_rewards(settings: LearnerSettings, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the same objects without a model: the rewards, no figures, and the first `rows` rows.

    The rows are those of the first data set of LEARNER_DATASET; their prompts have no tokens. Own
    rewards get completions in the form LEARNER_REWARD_COMPLETIONS. Raise ConfigError if no data set is
    named or a reward's code is not found, DataError for an unusable data set.
    """
    if not settings.dataset:
        raise ConfigError("LEARNER_DATASET is not set: name a file, a folder or a hub id in it")
    source = Source.parse(settings.dataset[0])
    found = list(islice(_read_without_model(source, settings), rows))
    if not found:
        raise DataError(f"{source.name}: the data set has no rows, expected at least one. Name another")
    form = settings.reward_completions
    own = {"columns": shared_columns(found), "max_steps": settings.max_steps, "completions": form}
    yield _contract(resolve_rewards(settings, own), {}, settings)
    for question in found:
        prompt = as_text(question.columns["prompt"])
        shown = {"where": question.where, "prompt": prompt, "tokens": 0}
        yield {"row": {**shown, "columns": question.columns}}


def _read_without_model(source: Source, settings: LearnerSettings) -> Iterator[Question]:
    """Yield the rows of a data set as questions without tokens, in order; read them when asked for.

    Raise DataError if the data set cannot be read or has a bad row.
    """
    reader = QuestionReader(settings, None, EpisodeSpec())
    split = settings.dataset_split
    if source.path and os.path.isdir(source.path):  # which cannot be streamed
        rows: Iterable[Any] = load_rows(source, split, settings.seed)[0]
    else:
        rows = stream_rows(source, split, None)
    mapping = None
    for number, row in enumerate(rows, 1):
        mapping = mapping or map_columns(row, source.name, settings, row)
        if question := reader.read(row, mapping, f"{source.name}, row {number}"):
            yield question


def _contract(
    specs: Iterable[RewardSpec], figures: Mapping[str, Any], settings: LearnerSettings
) -> dict[str, Any]:
    """Return the object of the first line: the rewards as plain data, and `figures` by title."""
    rewards = [asdict(spec) for spec in specs]
    return {"contract": {"rewards": rewards, "figures": figures, "episodes": settings.has_episodes}}


def _questions(plan: Plan, settings: LearnerSettings) -> Iterator[Question]:
    """Yield each question of the run once: those to train on, then the held-out ones.

    With evaluate_only only the held-out ones come. Of a stream only the first 10,000 questions are read.
    Raise DataError for a bad row of a stream, ConfigError if the chat template rejects a row.
    """
    training = plan.source.questions
    if not settings.evaluate_only:
        yield from training if len(training) else islice(training, STREAM_ROWS)
    yield from plan.source.eval_questions
