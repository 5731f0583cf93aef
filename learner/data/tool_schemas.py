"""The JSON schema of a tool, read off its type hints and its docstring. Runs in a sandbox process."""

from collections.abc import Callable
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from penstock.common.errors import ConfigError
from penstock.common.text import short


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of the function `tool` as transformers makes it, as a new dictionary.

    The schema has the tool's name, description and parameters, and is what TRL shows to the model. The
    tool is not called. Raise ConfigError, with the tool's name, if a type hint or a description in the
    docstring is missing.
    """
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # transformers parses the docstring, and raises what that raises
        raise ConfigError(
            f"the tool {getattr(tool, '__name__', repr(tool)[:80])} has no schema: {short(error)}. Give "
            "each parameter a type hint, and the docstring a sentence on the tool and a section Args: "
            "with a line `name: text` per parameter; wrap what is no function by def in one"
        ) from error
    return schema
