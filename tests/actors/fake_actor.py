"""The real actor with the fake engine: `python -m tests.actors.fake_actor`."""

from __future__ import annotations

import sys
import threading

from penstock.actors.loop import run
from penstock.common.config.command import ActorCommand
from penstock.common.config.settings import ActorSettings
from penstock.common.role import run_role
from penstock.common.wire.contract import Contract
from tests.fake_engine import FakeEngine


def make_engine(settings: ActorSettings, _contract: Contract) -> FakeEngine:
    """A FakeEngine as the environment describes it."""
    return FakeEngine.from_environment(settings.max_num_seqs)


def _run(settings: ActorCommand, stopping: threading.Event) -> None:
    run(settings, stopping, make_engine)


if __name__ == "__main__":
    sys.exit(run_role(ActorCommand, "actor", _run))
