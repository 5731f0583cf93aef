"""The model card of a checkpoint: README.md with the metadata that the hub reads."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.text import HUB_ID

_SHOWN = (
    "model_revision", "loss_type", "advantage_estimator", "scale_rewards", "groups_per_step",
    "num_generations", "max_prompt_length", "max_completion_length", "temperature", "learning_rate",
    "lr_scheduler_type", "beta", "epsilon", "epsilon_high", "max_staleness", "num_iterations",
    "num_mini_batches", "lora_rank", "dtype", "seed",
)  # fmt: skip
"""Settings in the card: numbers and names of methods. None of them can hold a path or a secret."""

_PACKAGES = ("penstock", "torch", "transformers", "deepspeed", "peft")


def model_card(settings: LearnerSettings, step: int, metrics: Mapping[str, Any]) -> str:
    """Return the text of README.md for the model after `step` Updates. Write nothing.

    The text begins with the hub's metadata and has three tables. The first shows `reward` and the
    `rewards/NAME/mean` of each reward from `metrics`, which are those of the newest step by name. The
    second shows twenty settings, such as loss_type and seed, the third versions of packages. What is
    missing has no row. The card names `settings.model` and `settings.dataset`; of a file or folder it
    has only the last part of the path.
    """
    base = hub_id(settings.model)
    datasets = [found for name in settings.dataset if (found := hub_id(name))]
    data = ModelCardData(
        base_model=base or None, datasets=datasets or None, library_name="transformers",
        pipeline_tag="text-generation", tags=["penstock", "reinforcement-learning", settings.loss_type],
    )  # fmt: skip
    values = settings.model_dump(mode="json")
    rewards = {name: metrics.get(f"rewards/{name}/mean") for name in settings.reward_names}
    text = "\n".join(
        [
            f"# {public_name(settings.model)}, trained by reinforcement learning",
            f"\nMade by Penstock in {step} Updates from `{public_name(settings.model)}`",
            f"with the questions of {_code(map(public_name, settings.dataset))}.\n",
            _table("reward", {"all, weighted": metrics.get("reward"), **rewards}),
            _table("setting", {name: values.get(name) for name in _SHOWN}),
            _table("package", {name: _version(name) for name in _PACKAGES}),
        ]
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def hub_id(name: str) -> str:
    """Return the hub's id in `name`, its part before the first ":", "@" or "#"; "" if that is none.

    An id has the form NAME or OWNER/NAME, and no file or folder here has this path.
    Example: "openai/gsm8k:main@abc" gives "openai/gsm8k", "./rows.jsonl" gives "".
    """
    head = re.split("[:@#]", name)[0]
    return head if HUB_ID.fullmatch(head) and not Path(head).exists() else ""


def public_name(name: str) -> str:
    """Return the name of a model or data set as others may read it: of a path only the last part.

    A hub's id stays as it is, with all that follows it. Example: "/home/me/mine/" gives "mine".
    """
    return name if hub_id(name) else name.rstrip("/").rpartition("/")[2]


def _code(names: Any) -> str:
    """Return names (any iterable of texts) in backquotes, joined by ", "; "no data set" for none."""
    return ", ".join(f"`{name}`" for name in names) or "no data set"


def _table(head: str, values: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row for each name and value, in order, ended by a line end.

    The columns have the headings `head` and "value". Values that are None or "" have no row.
    """
    rows = [
        f"| {name} | {_figure(value)} |" for name, value in values.items() if value not in (None, "")
    ]
    return "\n".join([f"| {head} | value |", "|---|---|", *rows, ""])


def _figure(value: Any) -> str:
    """Return a float with six significant digits at most, as "0.123457", any other value by str()."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
