"""The `rewarder` command. Settings are checked before anything heavy is imported."""

import sys
import threading

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import RewarderCommand
from penstock.common.role import run_role


class Rewarder(RewarderCommand):
    """Score the completions of a run and filter groups without signal."""

    def work(self) -> int:
        """Score until the run's end and return the exit code."""
        return run_role(self._score)

    def _score(self, stopping: threading.Event) -> None:
        from penstock.rewarders.loop import run

        run(self, stopping)


def main() -> None:
    """Run the `rewarder` command and exit with its code."""
    sys.exit(execute_command(Rewarder, "rewarder"))


if __name__ == "__main__":
    main()
