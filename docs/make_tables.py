"""Writes the tables of configuration.md from the settings themselves: `python docs/make_tables.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from penstock.common.config.command import SECTIONS

PAGE = Path(__file__).with_name("configuration.md")
_TABLES = re.compile(r"(?<=everywhere\.\n\n).*?(?=## How steps)", flags=re.DOTALL)


def tables() -> str:
    """One table per prefix: variable, default, meaning."""
    parts = []
    for prefix, section in SECTIONS.items():
        parts.append(f"## {section.__doc__}\n\n| variable | default | meaning |\n|---|---|---|")
        for name, field in section.model_fields.items():
            value = ",".join(field.default) if isinstance(field.default, list) else field.default
            shown = f"`{value}`" if value not in ("", {}) else ""
            parts.append(f"| {prefix}_{name.upper()} | {shown} | {field.description or ''} |")
        parts.append("")
    return "\n".join(parts) + "\n"


def page() -> str:
    """The page with its tables as they should be."""
    return _TABLES.sub(lambda _: tables(), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
