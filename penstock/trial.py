"""Trying a reward on rows, without a queue."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, DataError
from penstock.learner.data.columns import (
    as_messages,
    check_row,
    look_up,
    map_columns,
    plain,
    without_answer,
)
from penstock.learner.data.reward_specs import resolve_reward
from penstock.rewarders.adapt import OWN_ARGUMENTS, Reward, adapt
from penstock.rewarders.load import load_reward
from penstock.rewarders.reward_process import Scores, apply_reward


def try_reward(
    reward: str | Callable[..., object],
    rows: Iterable[Mapping[str, Any]],
    settings: LearnerSettings | None = None,
) -> list[Scores]:
    """Return a reward's scores for each row, by the rules of a run.

    `reward` is a name, `file.py:function` or `package.module.function`, as in LEARNER_REWARDS, or a
    function or class in one of the forms of docs/rewards.md. A row is a row of a data set with one more
    column: `completions`, a list of texts. They are scored in one call, as a group is. A row may have
    `completion_ids`, a list of token ids per completion; rewards that count tokens need them. `settings`
    has the reward's options and the names of the columns.

    The reward runs in this process, without the time and memory limits of a run. An exception of the
    reward is raised, where a run would count a failed scoring. Raise ConfigError if the reward is not
    found or of no known form, DataError if a row has no question, no gold answer where one is needed,
    or no completions, ValueError if the reward returns anything but one finite number or None for each
    completion.

    Example:
        >>> try_reward("accuracy", [{"question": "1+1=", "answer": "2", "completions": ["2", "3"]}])
        [Scores(values=(1.0, 0.0), extra={}, metrics={})]
    """
    asked = reward if isinstance(reward, str) else f"code:{_name_of(reward)}"
    used = _with_reward(asked, settings or LearnerSettings())
    function, is_own = _function_of(reward, used)
    return [
        apply_reward(function, _arguments(row, f"row {number}", used), is_own)
        for number, row in enumerate(rows, 1)
    ]


def _name_of(reward: Callable[..., object]) -> str:
    """Return the name of a function or class, or of an instance's class; "unnamed" for a lambda."""
    name = getattr(reward, "__name__", type(reward).__name__)
    return name if name.isidentifier() else "unnamed"  # <lambda>


def _with_reward(asked: str, settings: LearnerSettings) -> LearnerSettings:
    """Return these settings with the reward `asked` alone, weights and main reward left out.

    `asked` is a text as in LEARNER_REWARDS. Raise ConfigError if the settings are wrong, a line for
    each.
    """
    changes = {"rewards": [asked], "reward_weights": [], "metric_for_best_model": ""}
    try:
        return LearnerSettings(**{**settings.model_dump(exclude_unset=True), **changes})
    except ValidationError as error:
        texts = (detail["msg"].removeprefix("Value error, ") for detail in error.errors())
        raise ConfigError("\n".join(texts)) from error


def _function_of(reward: str | Callable[..., object], settings: LearnerSettings) -> tuple[Reward, bool]:
    """Return the function to call for `reward`, and whether it is the user's own code.

    A text is a name or place as in LEARNER_REWARDS. Raise ConfigError if the reward is not found or of
    no known form, as load_reward and adapt do.
    """
    if not isinstance(reward, str):
        return adapt(reward, _name_of(reward), settings.reward_completions), True
    spec = resolve_reward(reward, 1.0, settings)
    return load_reward(spec), bool(spec.source)


def _arguments(
    row: Mapping[str, Any], where: str, settings: LearnerSettings
) -> dict[str, Sequence[Any]]:
    """Return, by name, what a run would call the reward with for this row: a value for each completion.

    These are the row's columns, solution, prompts, completions, trainer_state and, if the row has them,
    completion_ids. `where`, such as "row 3", begins the error's text. Raise DataError if the row is
    wrong.
    """
    columns = {name: value for name, value in row.items() if name not in OWN_ARGUMENTS - {"prompt"}}
    completions = row.get("completions")
    if not isinstance(completions, (list, tuple)) or not completions:
        raise DataError(f"{where}: completions is {completions!r}; expected a list of texts")
    mapping = map_columns(columns, where, settings, columns)
    prompt = as_messages(look_up(columns, mapping.prompt), where)
    solution = look_up(columns, mapping.solution) if mapping.solution else None
    check_row(prompt, solution, mapping, where)
    given: dict[str, Any] = {name: plain(value) for name, value in columns.items() if name != "prompt"}
    if mapping.solution:
        given["solution"] = plain(solution)
    given["trainer_state"] = {"global_step": 0, "max_steps": settings.max_steps or 1}
    size = len(completions)
    arguments = {name: [value] * size for name, value in given.items()}
    if "completion_ids" in row:
        arguments["completion_ids"] = list(row["completion_ids"])
    return arguments | {"prompts": [without_answer(prompt)] * size, "completions": list(completions)}
