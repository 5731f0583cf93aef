"""The `rewarder` command. Nothing heavy is imported before the settings are known to be right."""

import sys
import threading

from penstock.common.config.command import RewarderCommand
from penstock.common.role import run_role


def main() -> None:
    """Score the completions of a run until it ends."""
    sys.exit(run_role(RewarderCommand, "rewarder", _run))


def _run(settings: RewarderCommand, stopping: threading.Event) -> None:
    from penstock.rewarders.loop import run

    run(settings, stopping)


if __name__ == "__main__":
    main()
