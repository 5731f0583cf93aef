"""deploy/ and the pages of the platforms name variables and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.common.config.variables import SECTIONS, variables
from tests.platforms.checks import DEPLOY, ROOT

PAGES = ("containers", "jobset", "kubernetes", "long-contexts", "skypilot", "slurm", "systemd")
FOLDERS = ("helm", "slurm", "systemd")
FILES = [
    *(path for folder in FOLDERS for path in sorted((DEPLOY / folder).rglob("*")) if path.is_file()),
    *(DEPLOY / name for name in ("Dockerfile", "compose.yaml", "queue-server.sh")),
    *(ROOT / "docs" / f"{page}.md" for page in PAGES),
]
_NAME = re.compile(rf"\b(?:{'|'.join(SECTIONS)})_[A-Z0-9_]+\b")


def unknown(text: str) -> set[str]:
    """The names in a text that look like a setting's variable and are none."""
    return set(_NAME.findall(text)) - set(variables())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_variable_that_is_named_exists(path: Path) -> None:
    assert unknown(path.read_text()) == set()


def test_a_misspelt_variable_is_found() -> None:
    assert unknown("env: {RUN_NAME: first, LEARNER_MAX_STEP: 1}") == {"LEARNER_MAX_STEP"}
    assert len(FILES) > 20
