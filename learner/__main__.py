"""The `learner` command. Settings are checked before anything heavy is imported."""

import json
import sys
from collections.abc import Mapping

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import LearnerCommand
from penstock.common.errors import DiskFull
from penstock.common.files.disk import is_full
from penstock.common.heavy_imports import heavy_imports
from penstock.common.log import configure_logs
from penstock.common.role import begin_role


class Learner(LearnerCommand):
    """Train the policy: issue tickets, take scored groups, publish weights."""

    def work(self) -> int:
        """Train to the end or a signal, return 0. Raise DiskFull for a full disk, or as run_learner."""
        stopping = begin_role()
        with heavy_imports():
            from penstock.learner.start import run_learner

        try:
            run_learner(self, stopping)
            return 0
        except OSError as error:  # a full disk at the start, or on another rank, is not waited for
            if not is_full(error):
                raise
            raise DiskFull(f"{error}: make room, then start again to resume") from error

    def execute(self) -> int:
        """Train, or print what --dry-run asks for; return the exit code. Raise as work or make_plan."""
        if not (self.dry_run and self.as_json):
            return super().execute()
        configure_logs("learner", self.run.log_format)
        from penstock.learner.data.preview import preview

        for line in preview(self.learner, self.rows):
            print(json.dumps(line, default=str))
        return 0

    def describe(self) -> Mapping[str, object]:
        """Return --dry-run's figures, such as the steps. Raise ConfigError or DataError as make_plan."""
        from penstock.learner.data.plan import describe, make_plan

        return describe(self.learner, make_plan(self.learner))


def main() -> None:
    """Run the `learner` command and exit with its code."""
    sys.exit(execute_command(Learner, "learner"))


if __name__ == "__main__":
    main()
