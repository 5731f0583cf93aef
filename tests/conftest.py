"""Fixtures of all tests: a real queue server, a connection to it, the keys of a new run."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from penstock.common.broker.acl import write_users
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.guard import guard_children
from tests.helpers import AclUsers

settings.register_profile("penstock", deadline=None, max_examples=60)
settings.load_profile("penstock")

_RUNS = itertools.count(1)

_LONGEST_FIRST = (
    "e2e/test_demo.py",
    "e2e/test_two_ranks.py",
    "e2e/test_server_loss.py",
    "rewarders/test_attacks.py",
    "e2e/test_secrets.py",
    "crashes/test_mutants.py",
    "actors/test_vllm_engine.py",
    "e2e/test_deadlines.py",
    "packaging/test_import_names.py",
    "crashes/test_matrix.py",
    "deploy/test_recipes.py",
    "e2e/test_chaos.py",
    "e2e/test_bad_input.py",
    "packaging/test_library.py",
    "common/test_protocol_machine.py",
    "e2e/test_kills.py",
    "e2e/test_poison.py",
    "e2e/test_lossy_network.py",
    "e2e/test_faults.py",
    "e2e/test_two_learners.py",
    "benchmarks/test_learner.py",
    "learner/test_gradients.py",
    "rewarders/test_pathologies.py",
)
"""Files of over ten seconds. Those that mostly wait lie beside those that compute."""


gc.disable()  # until all is imported, as in common/heavy_imports.py: collecting takes 10 s, not 15


def pytest_collection_finish() -> None:
    """Let the garbage collector run again, without the imported objects."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin the longest files first: several workers then end at about the same time."""
    order = {name: place for place, name in enumerate(_LONGEST_FIRST)}
    tests = Path(__file__).parent
    items.sort(key=lambda item: order.get(item.path.relative_to(tests).as_posix(), len(order)))


@pytest.fixture(autouse=True)
def forget_log_settings() -> Iterator[None]:
    """A command run inside a test points the logs at a stream that the test closes."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """One server for the whole session; tests keep apart by the names of their runs."""
    guard_children()  # a killed test session leaves no server behind
    with LocalServer(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[LocalServer]:
    """A server of the test's own, to be killed with .kill() and brought back with .start()."""
    with LocalServer(tmp_path / "private") as server:
        yield server


@pytest.fixture
def connection(queue_server: LocalServer) -> Iterator[Connection]:
    """A connection to the session's server."""
    connection = Connection(queue_server.url, connect_timeout_s=10, server_timeout_s=10)
    yield connection
    connection.close()


@pytest.fixture
def acl_users(private_server: LocalServer, tmp_path: Path, run_name: str) -> Iterator[AclUsers]:
    """A connection per role of the test's run, each with the role's user, and the operator's."""
    operator = Connection(private_server.url, 10, 10)
    users, _ = write_users(operator, private_server.url, run_name, tmp_path / "users")
    found = {user.role: Connection(user.file.read_text().strip(), 10, 10) for user in users}
    yield AclUsers(operator, **found)
    for connection in (operator, *found.values()):
        connection.close()


@pytest.fixture
def run_name() -> str:
    """The name of a run nobody else has on the session's server."""
    return f"test-{next(_RUNS)}"


@pytest.fixture
def keys(run_name: str) -> Keys:
    """The keys of a run of the test's own."""
    return Keys(run_name)
