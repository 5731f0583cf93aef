"""The tools and environments of a run, or its agent, as part of its contract."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.common.wire.plain import brief

MOST_METRICS = 64
"""Most numbers that an agent returns."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A function or class of a user.

    `source` is the absolute path of a Python file or the dotted name of a module, `name` the function or
    class in it, and `digest` the SHA-256 of that code.
    """

    name: str
    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """The tools and environments of a run, or its agent; without these, a rollout is one completion.

    With several environments, the row's column `environment` names the class. `schemas` has the JSON
    schemas of the tools by the environment's name, "" without an environment. `max_turns` limits the
    completions of a rollout after which tools are called, 0 is no limit. `step_timeout_s` is the time in
    seconds of a call of reset, a tool or get_reward. `gold` are the columns that may hold the gold
    answer, in lower case: a reset with ** gets them only if there is get_reward.

    An `agent` is a coroutine that owns its loop and calls the model through the actor's endpoint.
    `agent_timeout_s` is its time in seconds, `agent_sequences` the most sequences of its rollout.
    """

    tools: tuple[OwnCode, ...] = ()
    environments: tuple[OwnCode, ...] = ()
    schemas: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 0
    step_timeout_s: float = 0.0
    agent: OwnCode | None = None
    agent_timeout_s: float = 0.0
    agent_sequences: int = 1
    gold: tuple[str, ...] = ("solution",)

    @property
    def codes(self) -> tuple[OwnCode, ...]:
        """The user's code in a new tuple: first tools, then environments, then the agent; () if none."""
        return (*self.tools, *self.environments, *((self.agent,) if self.agent else ()))

    @property
    def active(self) -> bool:
        """Return True if the run has tools, environments or an agent."""
        return bool(self.codes)

    @property
    def settings(self) -> str:
        """The variables that name the code, as a text for errors: "LEARNER_AGENT" if there is an agent.

        Otherwise "LEARNER_TOOLS, LEARNER_ENVIRONMENT", also without tools and environments.
        """
        return "LEARNER_AGENT" if self.agent else "LEARNER_TOOLS, LEARNER_ENVIRONMENT"

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> "EpisodeSpec":
        """Return the spec that `value` holds by field names, as dataclasses.asdict has made it.

        Each tool and environment in `value` is a map too. A list may be in the place of a tuple. Raise
        KeyError without `tools`, `environments` or `agent`, TypeError for an unknown field.
        """
        codes = {
            name: tuple(OwnCode(**code) for code in value[name]) for name in ("tools", "environments")
        }
        agent = OwnCode(**value["agent"]) if value["agent"] else None
        return cls(**{**value, **codes, "agent": agent})

    def environment_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of the environment that answers the data set's row, "" if the run has none.

        `row` has the row's columns by name. The run's only environment is for every row. With several,
        the column `environment` decides. Raise ValueError if that column is missing or names none.
        """
        names = [code.name for code in self.environments]
        if len(names) < 2:
            return names[0] if names else ""
        found = row.get("environment")
        if found not in names:
            expected = f"expected one of LEARNER_ENVIRONMENT: {', '.join(names)}"
            raise ValueError(f"the column `environment` is {brief(found)}; {expected}. Correct the row")
        return str(found)

    def tools_of(self, row: Mapping[str, Any]) -> list[Any]:
        """Return a new list of the JSON schemas of the tools that the data set's row can call, or [].

        `row` has the row's columns by name. Raise ValueError if the run has several environments and the
        row's column `environment` names none of them.
        """
        return list(self.schemas.get(self.environment_of(row), ()))
