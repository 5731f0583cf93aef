"""The real actor with the fake engine: `python -m tests.actors.fake_actor`."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.actors.loop import run
from penstock.common.config.command import execute_command
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings
from penstock.common.role import begin_role
from penstock.common.wire.contract import Contract
from tests.fake_engine import FakeEngine


def make_engine(settings: ActorSettings, _contract: Contract, _model: Path) -> FakeEngine:
    """A FakeEngine as the environment describes it."""
    return FakeEngine.from_environment(settings.max_num_seqs)


class FakeActor(ActorCommand):
    """Generate with the fake engine."""

    def work(self) -> int:
        """Generate until the run's end and return the exit code."""
        run(self, begin_role(), make_engine)
        return 0


if __name__ == "__main__":
    sys.exit(execute_command(FakeActor, "actor"))
