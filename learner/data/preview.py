"""What `learner --dry-run --json` prints: a run before it starts, for `rewarder --check`.

One JSON object per line: {"contract": ..}, then {"row": ..} for the rows to show, then {"gold": ..} for
the gold answers. Nothing here calls a reward.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.wire.reward_spec import NEED_GOLD
from penstock.learner.data.order import Question
from penstock.learner.data.plan import Plan, describe, make_plan, read_model

STREAM_ROWS = 10_000
"""Questions of a stream that are read. A stream may have no end."""


def preview(settings: LearnerSettings, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the objects that `learner --dry-run --json` prints as lines, for a run with these settings.

    First comes {"contract": {"rewards", "figures"}}, then for the first `rows` questions, those to train
    on before those held out, {"row": {"where", "prompt" as text, "tokens": their number, "columns"}}. If
    a built-in reward needs gold answers, {"gold": [where, answer or None]} follows for each question (of
    a stream 10,000). Raise ConfigError for settings, model or code, DataError for an unusable data set.
    """
    plan = make_plan(settings)
    rewards = [asdict(spec) for spec in plan.contract.rewards]
    yield {"contract": {"rewards": rewards, "figures": describe(settings, plan)}}
    tokenizer, _ = read_model(plan.model_folder, settings.trust_remote_code)
    for question in islice(_questions(plan, settings), rows):
        prompt = tokenizer.decode(question.prompt_ids)
        shown = {"where": question.where, "prompt": prompt, "tokens": len(question.prompt_ids)}
        yield {"row": {**shown, "columns": question.columns}}
    if NEED_GOLD.isdisjoint(spec.name for spec in plan.contract.rewards if not spec.source):
        return
    for question in _questions(plan, settings):
        yield {"gold": [question.where, question.columns.get("solution")]}


def _questions(plan: Plan, settings: LearnerSettings) -> Iterator[Question]:
    """Yield each question of the run once: those to train on, then the held-out ones.

    With evaluate_only only the held-out ones come. Of a stream only the first 10,000 questions are read.
    Raise DataError for a bad row of a stream, ConfigError if the chat template rejects a row.
    """
    training = plan.source.questions
    if not settings.evaluate_only:
        yield from training if len(training) else islice(training, STREAM_ROWS)
    yield from plan.source.eval_questions
