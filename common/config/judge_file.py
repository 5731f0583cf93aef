"""The file that describes a judge: `judge:NAME=FILE.toml` in LEARNER_REWARDS."""

import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.common.errors import ConfigError
from penstock.common.files.reading import explain
from penstock.common.text import short
from penstock.common.wire.limits import HIGHEST_REWARD
from penstock.common.wire.plain import find_fault

_OURS = frozenset({"model", "messages", "n", "stream"})
_LONGEST = 2**16
"""Most bytes of a judge's file: it travels in the contract."""


class JudgeFile(BaseModel):
    """One judge: a model behind an OpenAI-compatible address, its prompt, and how its score is read.

    The judge gets `prompt` as a user's message, in which {prompt}, {completion} and {COLUMN} are
    replaced. The score is the number behind the last `score_after` of the judge's answer, in upper or
    lower case. An answer without such a number from `lowest` to `highest` has no score. `request` holds
    further fields of the request, such as temperature. Creating it raises pydantic's ValidationError.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    score_after: str = Field("Score:", min_length=1)
    lowest: float = Field(0.0, ge=-HIGHEST_REWARD)
    highest: float = Field(10.0, le=HIGHEST_REWARD)
    request: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        """Return self. Raise ValueError for fields that cannot be used.

        These are a prompt without {completion}, a `lowest` not below `highest`, and a `request` with
        model, messages, n or stream, or with a value that no message can carry, such as a date of TOML.
        """
        if "{completion}" not in self.prompt:
            raise ValueError("prompt has no {completion}; write it where the completion is to stand")
        if not self.lowest < self.highest:
            raise ValueError(f"lowest is {self.lowest:g}, expected a number below highest; lower it")
        if taken := _OURS & self.request.keys():
            raise ValueError(f"request: {', '.join(sorted(taken))} is set by Penstock: leave it out")
        if fault := find_fault(self.request):
            raise ValueError(f"request cannot be stored: {fault}; correct this value in `request`")
        return self


def read_judge(path: Path, asked: str) -> JudgeFile:
    """Return the judge that the TOML file `path` describes.

    Raise ConfigError if the file cannot be read, is longer than 64 KiB, is no TOML in UTF-8, or has a
    key that is unknown, missing or of another type, or a value that cannot be used. The text begins with
    `asked`, the reward as LEARNER_REWARDS names it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ConfigError(f"{asked}: {path} is longer than {_LONGEST} bytes: shorten it")
        return JudgeFile(**tomllib.loads(text.decode()))
    except ValidationError as error:
        raise ConfigError(f"{asked}: {path}: {explain_judge(error)}; correct the file") from None
    except (OSError, ValueError, RecursionError, TypeError) as error:
        fault = f"{asked}: {path} cannot be read as TOML: {explain(error)}; correct the file"
        raise ConfigError(fault) from error


def explain_judge(error: ValidationError) -> str:
    """Return the first mistake of a judge's file, cut to 200 characters, as "model: Field required"."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return short(f"{place}: {first['msg']}" if place else first["msg"].removeprefix("Value error, "))
