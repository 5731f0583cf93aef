"""The `rewarder` command. Settings are checked before anything heavy is imported."""

import sys

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import RewarderCommand
from penstock.common.errors import ConfigError
from penstock.common.heavy_imports import heavy_imports
from penstock.common.log import configure_logs
from penstock.common.role import begin_role
from penstock.common.text import to_line


class Rewarder(RewarderCommand):
    """Score the completions of a run and filter groups without signal."""

    def execute(self) -> int:
        """Score until the run ends, print help or settings (`help`, --dry-run), or check; return 0.

        With --check, read the lines of `learner --dry-run --json` from standard input, and print as one
        JSON object what is wrong with rewards and gold answers. Raise ConfigError for --check with a
        terminal as standard input, PenstockError if the work fails.
        """
        if not self.check or self.words:
            return super().execute()
        if sys.stdin.isatty():
            wanted = "expected what `learner --dry-run --json` prints: use `penstock check`"
            raise ConfigError(f"--check: standard input is a terminal, {wanted}, which joins the two")
        configure_logs("rewarder", self.run.log_format)
        begin_role()
        from penstock.rewarders.check import check_lines

        print(to_line(check_lines(sys.stdin, self.rewarder)))
        return 0

    def work(self) -> int:
        """Score until the run has ended or SIGINT or SIGTERM has come, and return 0.

        Groups in progress are finished first, unless Ctrl-C comes again. A guard process is started,
        which kills this one's children once it has ended. Raise PenstockError if the work fails.
        """
        stopping = begin_role()
        with heavy_imports():
            from penstock.rewarders.loop import run

        run(self, stopping)
        return 0


def main() -> None:
    """Run the `rewarder` command with the words of the command line, and exit with its exit code."""
    sys.exit(execute_command(Rewarder, "rewarder"))


if __name__ == "__main__":
    main()
