from __future__ import annotations

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from tests.common.builders import Run


@pytest.fixture
def run(connection: Connection, keys: Keys) -> Run:
    """A run that its learner has set up."""
    return Run(connection, keys)
