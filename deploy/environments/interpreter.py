"""A Python interpreter: LEARNER_ENVIRONMENT=interpreter.py:Interpreter. Its process is a sandbox."""

import contextlib
import io
from typing import Any

_LONGEST = 2000


class Interpreter:
    """Runs Python. Names stay defined until the end of the conversation."""

    def reset(self, **row: Any) -> None:
        """Forget all names that code has defined. The columns of the data, `row`, are not used."""
        self._names: dict[str, Any] = {}

    def run(self, code: str) -> str:
        """Run Python code and return what it prints. Names stay defined.

        Args:
            code: The code. Print what you want to see.

        Returns:
            The printed text, then any error as "Class: text", cut to 2000 characters; or
            "Nothing was printed."
        """
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self._names)
        except (Exception, SystemExit) as error:  # of the policy's code
            printed.write(f"{type(error).__name__}: {error}")
        return printed.getvalue()[:_LONGEST] or "Nothing was printed."
