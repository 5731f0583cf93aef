"""A Python interpreter: LEARNER_ENVIRONMENT=interpreter.py:Interpreter. Its process is a sandbox."""

import contextlib
import io
from typing import Any

_LONGEST = 2000


class Interpreter:
    """Runs Python. Names stay defined until the end of the conversation."""

    def reset(self, **row: Any) -> None:
        """Begin without names."""
        self._names: dict[str, Any] = {}

    def run(self, code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: The code. Print what you want to see.
        """
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self._names)
        except Exception as error:
            printed.write(f"{type(error).__name__}: {error}")
        return printed.getvalue()[:_LONGEST] or "Nothing was printed."
