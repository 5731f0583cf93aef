"""The `actor` command."""

from __future__ import annotations

import sys
import threading

from common.command import ActorCommand
from common.role import run_role


def main() -> int:
    """Run an actor; returns the exit code."""
    return run_role(ActorCommand, "actor", _run)


def _run(settings: ActorCommand, stopping: threading.Event) -> None:
    from actors.loop import run
    from actors.vllm_engine import VllmEngine

    run(settings, stopping, VllmEngine)


if __name__ == "__main__":
    sys.exit(main())
