"""The `rewarder` command. Settings are checked before anything heavy is imported."""

import json
import sys

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import RewarderCommand
from penstock.common.errors import ConfigError
from penstock.common.heavy_imports import heavy_imports
from penstock.common.log import configure_logs
from penstock.common.role import begin_role


class Rewarder(RewarderCommand):
    """Score the completions of a run and filter groups without signal."""

    def execute(self) -> int:
        """Score, or with --check read standard input and print a JSON object; return the exit code.

        Raise ConfigError for --check at a terminal, PenstockError if the work fails.
        """
        if not self.check or self.words:
            return super().execute()
        if sys.stdin.isatty():
            raise ConfigError("--check reads `learner --dry-run --json`: use `penstock check`")
        configure_logs("rewarder", self.run.log_format)
        begin_role()
        from penstock.rewarders.check import check_lines

        print(json.dumps(check_lines(sys.stdin, self.rewarder)))
        return 0

    def work(self) -> int:
        """Score until the run's end or a signal and return 0. Raise PenstockError if that fails."""
        stopping = begin_role()
        with heavy_imports():
            from penstock.rewarders.loop import run

        run(self, stopping)
        return 0


def main() -> None:
    """Run the `rewarder` command and exit with its code."""
    sys.exit(execute_command(Rewarder, "rewarder"))


if __name__ == "__main__":
    main()
