"""The `actor` command. The settings are checked before vllm is imported."""

import sys

from penstock.common.config.command import execute_command
from penstock.common.config.role_command import ActorCommand
from penstock.common.heavy_imports import heavy_imports
from penstock.common.role import begin_role


class Actor(ActorCommand):
    """Generate completions for the tickets of a run, with one inference engine."""

    def work(self) -> int:
        """Turn the run's tickets into groups with vLLM until the run ends or a signal comes; return 0.

        The first SIGINT or SIGTERM ends the work in order, Ctrl-C after it at once. A guard process is
        started, which kills this process's children when this process has ended. Raise ConfigError,
        EngineFailed, DeadlineExceeded, RunNotReady, MalformedMessage or ServerUnavailable, as
        actors.loop.run does.
        """
        stopping = begin_role()
        with heavy_imports():
            from penstock.actors.loop import run
            from penstock.actors.vllm_engine import VllmEngine

        run(self, stopping, VllmEngine)
        return 0


def main() -> None:
    """Run the `actor` command with the process's arguments, and end the process with its exit code."""
    sys.exit(execute_command(Actor, "actor"))


if __name__ == "__main__":
    main()
