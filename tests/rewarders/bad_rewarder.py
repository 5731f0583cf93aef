"""The real rewarder with a bad reward in place of `accuracy`: the one that BAD_REWARD names."""

from __future__ import annotations

import os
import sys
import threading

from common.command import RewarderCommand
from common.role import run_role
from rewarders.loop import run
from tests.rewarders.bad_rewards import REWARDS


def _run(settings: RewarderCommand, stopping: threading.Event) -> None:
    run(settings, stopping, {"accuracy": REWARDS[os.environ["BAD_REWARD"]]})


if __name__ == "__main__":
    sys.exit(run_role(RewarderCommand, "rewarder", _run))
