"""Writes the tables of configuration.md and coming-from.md: `python docs/make_tables.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

from penstock.common.config.other_names import OTHER_NAMES
from penstock.common.config.variables import REQUIRED, SECTIONS, START_HERE, field_of

PAGE = Path(__file__).with_name("configuration.md")
NAMES_PAGE = Path(__file__).with_name("coming-from.md")
_NAMES = re.compile(r"(?<=answered from this table\.\n\n).*?(?=## )", flags=re.DOTALL)
_TABLES = re.compile(r"(?<=everywhere\.\n\n).*?(?=## How steps)", flags=re.DOTALL)


def tables() -> str:
    """The ten settings that matter first, then one table per prefix: variable, default, meaning."""
    parts = ["## Start here\n\n| variable | default | meaning |\n|---|---|---|"]
    for variable in START_HERE:
        field = field_of(variable)
        shown = "**required**" if variable in REQUIRED else default(field)
        parts.append(f"| {variable} | {shown} | {field.description} |")
    parts.append("")
    for prefix, section in SECTIONS.items():
        parts.append(f"## {section.__doc__}\n\n| variable | default | meaning |\n|---|---|---|")
        for name, field in section.model_fields.items():
            variable = f"{prefix}_{name.upper()}"
            shown = "**required**" if variable in REQUIRED else default(field)
            parts.append(f"| {variable} | {shown} | {field.description or ''} |")
        parts.append("")
    return "\n".join(parts) + "\n"


def default(field: FieldInfo) -> str:
    """A setting's default as code; nothing for an empty one."""
    value = ",".join(field.default) if isinstance(field.default, list) else field.default
    return f"`{value}`" if value not in ("", {}) else ""


def page() -> str:
    """The page with its tables as they should be."""
    return _TABLES.sub(lambda _: tables(), PAGE.read_text())


def names_page() -> str:
    """The page about other systems with its table of names as it should be."""
    rows = [
        f"| {system} | `{name}` | {here} |"
        for system, names in OTHER_NAMES.items()
        for name, here in names.items()
    ]
    table = "\n".join(["| system | name | here |", "|---|---|---|", *rows])
    return _NAMES.sub(lambda _: f"{table}\n\n", NAMES_PAGE.read_text(), count=1)


if __name__ == "__main__":
    PAGE.write_text(page())
    NAMES_PAGE.write_text(names_page())
    sys.exit(0)
