"""The `actor` command."""

import sys
import threading

from penstock.common.config.command import ActorCommand
from penstock.common.role import run_role


def main() -> int:
    """Run an actor; returns the exit code."""
    return run_role(ActorCommand, "actor", _run)


def _run(settings: ActorCommand, stopping: threading.Event) -> None:
    from penstock.actors.loop import run
    from penstock.actors.vllm_engine import VllmEngine

    run(settings, stopping, VllmEngine)


if __name__ == "__main__":
    sys.exit(main())
