"""A tool without type hints or descriptions is refused by its name, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.errors import ConfigError
from penstock.learner.data.episode_specs import resolve_episodes
from penstock.learner.data.tool_schemas import schema_of
from tests.common import bad_environments
from tests.common.bad_environments import Counter, add, later
from tests.learner.builders import make_settings


def untyped(a):  # type: ignore[no-untyped-def]
    """Do.

    Args:
        a: One.
    """


def silent(a: int) -> None: ...


def undescribed(a: int) -> None:
    """Do."""


@pytest.mark.parametrize(
    ("tool", "found"),
    [(untyped, "missing a type hint"), (silent, "no docstring"), (undescribed, "description for")],
)
def test_what_is_missing_is_named(tool: Callable[..., Any], found: str) -> None:
    with pytest.raises(
        ConfigError, match=f"the tool {tool.__name__} has no schema: .*{found}"
    ) as raised:
        schema_of(tool)
    assert "Give each parameter a type hint" in str(raised.value)


@pytest.mark.parametrize("tool", [add, later, Counter.increase, Counter().increase])
def test_functions_sync_or_async_and_methods_have_a_schema(tool: Callable[..., Any]) -> None:
    schema = schema_of(tool)["function"]
    assert schema["name"] == tool.__name__
    assert "self" not in schema["parameters"]["properties"]
    assert schema["parameters"]["required"]


def test_the_spec_of_a_run_names_the_columns_of_the_gold_answer() -> None:
    settings = make_settings(tools=[f"{bad_environments.__file__}:add"], solution_column="Gold")
    template: Any = SimpleNamespace(chat=SimpleNamespace(template="tools"))
    found = resolve_episodes(settings, template)
    assert [tool["function"]["name"] for tool in found.schemas[""]] == ["add"]
    assert {"gold", "solution"} <= set(found.gold)
    assert "gold" not in resolve_episodes(make_settings(), template).gold
