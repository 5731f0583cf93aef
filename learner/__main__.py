"""The `learner` command. Settings are checked before anything heavy is imported."""

import sys
from collections.abc import Mapping
from functools import partial

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import LearnerCommand
from penstock.common.heavy_imports import heavy_imports
from penstock.common.log import configure_logs
from penstock.common.role import begin_role
from penstock.common.text import to_line


class Learner(LearnerCommand):
    """Train the policy: issue tickets, take scored groups, publish weights."""

    def work(self) -> int:
        """Train to the end of the run, or until SIGINT or SIGTERM, and return 0.

        The first signal lets the learner write a checkpoint and end; Ctrl-C after it ends the process
        at once. Raise OSError for a full disk where nobody waits, RunTaken if another learner holds the
        run, ConfigError or DataError if settings or data cannot work, and the other PenstockErrors that
        end a training.
        """
        stopping = begin_role()
        with heavy_imports():
            from penstock.learner.start import run_learner

        run_learner(self, stopping)
        return 0

    def execute(self) -> int:
        """Train, or print what --dry-run or `help` asks for. Return the exit code.

        With --dry-run --json print the contract, `rows` rows and the gold answers as lines of JSON, for
        `rewarder --check`; with --rewards-alone the rewards and rows alone. With --dry-run without
        --json print the settings and figures such as the steps. Raise ConfigError
        or DataError if settings or data cannot work, and the errors that end a training.
        """
        if not (self.dry_run and self.as_json):
            return super().execute()
        configure_logs("learner", self.run.log_format)
        from penstock.learner.data.preview import preview, preview_rewards

        if self.rewards_alone:
            lines = preview_rewards(self.learner, self.rows)
        else:
            from penstock.learner.report.run_record import check_next_start  # imports torch

            check = partial(check_next_start, self.run.folder, self.learner)
            lines = preview(self.learner, self.rows, check)
        for line in lines:
            print(to_line(line))
        return 0

    def describe(self) -> Mapping[str, object]:
        """Return the figures that --dry-run prints, by title, such as the number of steps.

        Model and data are read for this, and downloaded if need be. Raise ConfigError if settings, model
        or code cannot work, DataError if a data set cannot be read, ServerUnavailable without the hub.
        """
        from penstock.learner.data.plan import describe, make_plan

        return describe(self.learner, make_plan(self.learner))


def main() -> None:
    """Run the `learner` command by the words of the command line, and end the process with its code.

    The code is 0 at the end of the run or after a signal. A PenstockError is printed and gives its own.
    The process ends by SystemExit.
    """
    sys.exit(execute_command(Learner, "learner"))


if __name__ == "__main__":
    main()
