"""The `actor` command. The settings are checked before vllm is imported."""

import sys

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import ActorCommand
from penstock.common.role import begin_role


class Actor(ActorCommand):
    """Generate completions for the tickets of a run, with one inference engine."""

    def work(self) -> int:
        """Generate until the run's end or a signal and return 0. Raise as actors.loop.run does."""
        stopping = begin_role()
        from penstock.actors.loop import run
        from penstock.actors.vllm_engine import VllmEngine

        run(self, stopping, VllmEngine)
        return 0


def main() -> None:
    """Run the `actor` command and exit with its code."""
    sys.exit(execute_command(Actor, "actor"))


if __name__ == "__main__":
    main()
