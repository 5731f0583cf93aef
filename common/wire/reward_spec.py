"""The built-in rewards, and the description of a run's rewards in its contract."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
"""How several rewards become an advantage, by TRL's names."""

BUILT_IN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("accuracy", "acc", "base_acc", "format", "strict_format", "xml_tags"), ()),
    "correctness": (),
    "cosine": (
        *("cosine_min_len_value_wrong", "cosine_max_len_value_wrong"),
        *("cosine_min_len_value_correct", "cosine_max_len_value_correct", "cosine_max_len"),
    ),
    "length": (),
    "soft_overlong": ("soft_max_length", "soft_cache_length"),
    "repetition": ("repetition_n_grams", "repetition_max_penalty"),
    "language_consistency": ("target_language",),
    "environment": (),
}
"""The built-in rewards, each with the settings that it takes as keyword arguments.

The values of `environment` come with the rollouts: they are what the environment's get_reward returned.
"""

NEED_GOLD = frozenset({"accuracy", "acc", "base_acc", "correctness", "cosine", "length"})
"""The built-in rewards that need a gold answer."""

ACCURACY_LIKE = ("accuracy", "acc", "base_acc", "correctness")
"""The built-in rewards that tell a right answer, which gets 1 or more, from a wrong one."""

COLUMNS = (
    "step", "prompt", "completion", "advantage", "reward", "ticket", "index", "state", "failure",
    "completion_length", "finish_reason", "staleness_mean", "staleness_max", "versions", "actors",
    "solution", "extra",
)  # fmt: skip
"""Columns of the table of completions. Each reward adds a column of its name."""

LANGUAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("en", "de", "es", "fr", "id", "it", "nl", "pl", "pt", "tr", "vi"), ("LATIN",)),
    **dict.fromkeys(("ru", "uk"), ("CYRILLIC",)),
    **dict.fromkeys(("ar", "fa"), ("ARABIC",)),
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"),
    "ko": ("HANGUL",),
    "el": ("GREEK",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "th": ("THAI",),
}
"""The languages of language_consistency, each with the Unicode names of its scripts."""


MODEL: Final = "model"
"""The kind of a reward that a model computes: `model:NAME=FOLDER-or-id` in LEARNER_REWARDS."""


JUDGE: Final = "judge"
"""The kind of a reward that a judge gives: `judge:NAME=FILE.toml` in LEARNER_REWARDS."""


def split_kind(asked: str) -> tuple[str, str, str] | None:
    """Return (kind, name, place) of an entry "KIND:NAME=PLACE" of LEARNER_REWARDS, without outer spaces.

    KIND is "model" or "judge". PLACE is a model's folder or hub id, or a judge's file. Return None for
    every other entry.
    Example:
        >>> split_kind("model:helpful=models/rm"), split_kind("accuracy")
        (('model', 'helpful', 'models/rm'), None)
    """
    kind, _, rest = asked.partition(":")
    if kind not in (MODEL, JUDGE) or "=" not in rest:
        return None
    name, _, place = rest.partition("=")
    return kind, name.strip(), place.strip()


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward of a run, as part of the contract.

    `source` is empty for a built-in reward, else the absolute path of a Python file or the dotted name
    of a module; `digest` is the SHA-256 of that code. A built-in reward's `options` are its keyword
    arguments. A user's reward has the options `completions` (the form of the completions: auto, text or
    messages), `columns` (the names of the data's columns) and `max_steps` (the run's number of Updates).

    With the kind MODEL, a sequence classification model computes the reward. Its options are `model`, a
    folder or a hub id, and `revision`, the commit of an id. The digest is that of a folder's files.
    With the kind JUDGE, the options are the fields of a JudgeFile.
    """

    name: str
    weight: float = 1.0
    source: str = ""
    digest: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    kind: Literal["", "model", "judge"] = ""
