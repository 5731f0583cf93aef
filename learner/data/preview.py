"""What `learner --dry-run --json` prints: a run before it starts, for `rewarder --check`.

One JSON object per line: {"contract": ..}, then {"row": ..} for the rows to show, then {"gold": ..} for
the gold answers. Nothing here calls a reward.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.wire.reward_spec import NEED_GOLD
from penstock.learner.data.order import Question
from penstock.learner.data.plan import Plan, describe, make_plan, read_model

MOST_GOLDS = 10_000
"""Gold answers that are checked; of more, so many in equal distances."""

_STREAMED = 1000
"""Questions of a stream that are read."""


def preview(settings: LearnerSettings, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the lines' objects for a run with these settings, with so many rows to show.

    Gold answers come only if a built-in reward needs them. Raise ConfigError or DataError, as make_plan.
    """
    plan = make_plan(settings)
    rewards = [asdict(spec) for spec in plan.contract.rewards]
    yield {"contract": {"rewards": rewards, "figures": describe(settings, plan)}}
    questions = _questions(plan, rows)
    tokenizer, _ = read_model(plan.model_folder)
    for question in questions[:rows]:
        prompt = tokenizer.decode(question.prompt_ids)
        shown = {"where": question.where, "prompt": prompt, "tokens": len(question.prompt_ids)}
        yield {"row": {**shown, "columns": question.columns}}
    if NEED_GOLD.isdisjoint(spec.name for spec in plan.contract.rewards if not spec.source):
        return
    places = np.linspace(0, len(questions) - 1, min(len(questions), MOST_GOLDS)).astype(int)
    for place in places:
        yield {"gold": [questions[place].where, questions[place].columns.get("solution")]}


def _questions(plan: Plan, rows: int) -> list[Question]:
    """Return the questions of an epoch, of a stream the first ones, then those held out."""
    source = plan.source
    count = len(source.questions) or max(_STREAMED, rows)
    return list(chain(map(source.questions.at, range(count)), source.eval_questions))
