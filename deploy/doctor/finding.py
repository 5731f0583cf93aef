"""A finding of `penstock doctor`: what was found, why this matters, and what to type or set."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.common.text import hide_passwords, one_line, short

Severity = Literal["error", "warning", "info"]
ORDER: tuple[Severity, ...] = ("error", "warning", "info")
"""The severities, the worst first. An error keeps the run from starting, or from its end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `check` is the name of the check that found this, such as "memory".

    `remedy` begins with `type:` before a shell command, `set:` before variables, as A=1 B=2, or `do:`
    before a sentence.
    """

    check: str
    severity: Severity
    found: str
    why: str
    remedy: str

    def lines(self) -> list[str]:
        """Return three printable lines: severity and what was found, why this matters, the remedy."""
        texts = (f"{self.severity}: {self.found}", f"  why: {self.why}", f"  {self.remedy}")
        return [one_line(hide_passwords(short(text, 2000))) for text in texts]


def assign(values: Mapping[str, object]) -> str:
    """Return the remedy that sets variables: `set: A=1 B=true` for {"A": 1, "B": True}.

    Each value is quoted for a shell where needed. Truth values are in lower case, as settings take them.
    """
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }
    return "set: " + " ".join(f"{name}={shlex.quote(text)}" for name, text in texts.items())
