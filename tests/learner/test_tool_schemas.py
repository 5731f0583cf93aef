"""A tool without type hints or descriptions is refused by its name, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.common.errors import ConfigError
from penstock.learner.data.tool_schemas import schema_of
from tests.common.bad_environments import Counter, add, later


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
