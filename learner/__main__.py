"""`learner`: settings first, so that a mistake is told before anything heavy is imported."""

import sys
import threading
from typing import Any

from penstock.common.config.command import LearnerCommand
from penstock.common.errors import DiskFull
from penstock.common.files.disk import is_full
from penstock.common.role import run_role


def _run(command: LearnerCommand, stopping: threading.Event) -> None:
    from penstock.learner.start import run_learner

    try:
        run_learner(command, stopping)
    except OSError as error:  # where it is not waited for: at the start, or beside other ranks
        if not is_full(error):
            raise
        raise DiskFull(f"{error}: make room, then start again to resume") from error


def _describe(command: LearnerCommand) -> dict[str, Any]:
    from penstock.learner.data.plan import describe

    return describe(command.learner)


def main() -> None:
    """Run the learner; exits with the code of `common.errors`."""
    sys.exit(run_role(LearnerCommand, "learner", _run, _describe))


if __name__ == "__main__":
    main()
