"""Learner processes that are forked from one that has imported everything, which takes eight seconds.

As a script it is that process. Each line of its standard input is a JSON object and makes one learner;
the learner's exit code is written as a line of standard output.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.site import ROOT

_LIMIT_S = 300


class ForkedLearners:
    """The command `learner`, to be run often."""

    def __enter__(self) -> ForkedLearners:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.communicate(timeout=_LIMIT_S)

    def run(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], errors: Path
    ) -> tuple[int, str]:
        """Run a learner to its end; return its exit code and its standard error, written to a file."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        print(
            json.dumps([arguments, dict(environment), str(errors)]), file=self._parent.stdin, flush=True
        )
        return int(self._parent.stdout.readline()), errors.read_text()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an import may print

    import penstock.learner.start  # noqa: F401
    from penstock.learner.__main__ import main as learner

    gc.freeze()  # otherwise each learner would take two seconds to free all modules at its end
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _prepare(*json.loads(line))
            learner()  # ends as any Python process does
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies)


def _prepare(arguments: list[str], environment: dict[str, str], errors: str) -> None:
    """Give this process, just forked, what a shell would."""
    signal.alarm(_LIMIT_S)
    sys.argv = ["learner", *arguments]
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDWR)
    written = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((nothing, nothing, written)):
        os.dup2(file, number)


if __name__ == "__main__":
    main()
