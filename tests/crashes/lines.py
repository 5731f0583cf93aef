"""Running a module of this folder as a process of its own, whose threads no fork inherits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_LIMIT_S = 1500


def lines_of(module: str, *arguments: str) -> list[Any]:
    """What a module prints, a JSON value per line."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    assert result.stdout, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
