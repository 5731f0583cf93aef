"""The policy as the learner uses it, and calls of its methods on all ranks at once.

Rank 0 alone reads the data, writes the run's folder and talks to Redis. A method of the policy (an
Update, a save, an export) must be executed by all ranks together: rank 0 broadcasts the call, then every
rank executes the same method with the same arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from penstock.common.errors import DeadlineExceeded
from penstock.learner.algorithm.batch import Batch
from penstock.learner.policy.processes import broadcast, rank
from penstock.learner.policy.update import Update


class TrainablePolicy(Protocol):
    """The methods of a policy that the learner's loop, resume and checkpoints call."""

    def update(self, batch: Batch, step: int) -> Update:
        """Train on the batch and return the Update; `step` counts the Updates made before."""

    def save(self, folder: Path) -> None:
        """Write the state of the training into the folder, for `load`."""

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, exactly."""

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face model. Raise NotFinite on NaN or infinity."""

    def close(self) -> None:
        """Release the process group."""


class AllRanksPolicy:
    """Rank 0's policy whose every method is executed on all ranks.

    Each call passes its description ("making an Update") to `enter_phase`, and afterwards "working".
    """

    def __init__(self, policy: TrainablePolicy, enter_phase: Callable[[str], None]) -> None:
        self._policy = policy
        self._enter_phase = enter_phase

    @contextmanager
    def _on_all_ranks(self, phase: str, method: str, *arguments: Any) -> Iterator[None]:
        """Broadcast the call to the other ranks; the block executes the same call on rank 0."""
        self._enter_phase(phase)
        broadcast((method, arguments))
        yield
        self._enter_phase("working")

    def update(self, batch: Batch, step: int) -> Update:
        """See TrainablePolicy."""
        with self._on_all_ranks("making an Update", "update", batch, step):
            return self._policy.update(batch, step)

    def save(self, folder: Path) -> None:
        """See TrainablePolicy."""
        with self._on_all_ranks("writing a checkpoint", "save", folder):
            self._policy.save(folder)

    def load(self, folder: Path) -> None:
        """See TrainablePolicy."""
        with self._on_all_ranks("reading a checkpoint", "load", folder):
            self._policy.load(folder)

    def export(self, folder: Path) -> None:
        """See TrainablePolicy."""
        with self._on_all_ranks("writing weights", "export", folder):
            self._policy.export(folder)

    def close(self) -> None:
        """See TrainablePolicy."""
        with self._on_all_ranks("closing the policy", "close"):
            self._policy.close()


def execute_calls(policy: TrainablePolicy) -> None:
    """Execute the calls that rank 0 broadcasts, on any other rank, up to and including `close`.

    Raise DeadlineExceeded when the connection to rank 0 is lost.
    """
    method = ""
    while method != "close":
        try:
            method, arguments = broadcast(None)
        except RuntimeError as error:
            raise DeadlineExceeded(f"rank {rank()} lost its connection to rank 0: {error}") from error
        getattr(policy, method)(*arguments)
