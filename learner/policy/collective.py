"""The policy as the learner calls it, and execution of these calls on all ranks together.

Rank 0 alone reads the data, writes the run's folder and talks to Redis. Rank 0 broadcasts each call of a
method of the policy, then every rank executes the method with the same arguments.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from penstock.common.errors import DeadlineExceeded
from penstock.common.phases import Phases
from penstock.learner.algorithm.batch import Batch
from penstock.learner.policy.processes import broadcast, rank
from penstock.learner.policy.update import Update

UPDATE = "making an Update"
"""The learner's phase during an Update."""


Form = Literal["checkpoint", "version", "adapter"]
"""What an export has: the model and with LoRA its adapter beside it, the model alone, or the adapter."""


class TrainablePolicy(Protocol):
    """The methods of a policy that the learner's loop, resume and checkpoints call."""

    def update(self, batch: Batch, step: int) -> Update:
        """Train on the batch and return the Update; `step` counts the Updates made before. Abstract."""

    def save(self, folder: Path) -> None:
        """Write the state of the training into the existing folder, for `load`. Abstract here."""

    def load(self, folder: Path) -> None:
        """Restore the state of the training that `save` wrote into the folder, exactly. Abstract."""

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        """Write the weights into the folder as a Hugging Face model, in this form. Abstract here.

        Implementations raise NotFinite if a weight is NaN or infinite.
        """

    def score(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities of each text's tokens (L,) after the first. Abstract here."""

    def offload(self) -> None:
        """Move all that is on the device to the CPU's memory, until `reload`. Abstract here."""

    def reload(self) -> None:
        """Move back to the device, unchanged, what `offload` moved away. Abstract here."""

    def close(self) -> None:
        """Leave the process group of the ranks; the policy cannot be used afterwards. Abstract."""


class AllRanksPolicy:
    """Rank 0's policy, whose methods all ranks execute on policies of their own.

    `policy` is the one of rank 0. Each call broadcasts its name and arguments to the other ranks, which
    execute it in `execute_calls`. In `phases` a call is a phase, such as "making an Update".
    """

    def __init__(self, policy: TrainablePolicy, phases: Phases) -> None:
        self._policy, self._phases = policy, phases

    def _on_all_ranks(self, phase: str, method: str, *arguments: Any) -> Any:
        """Call the policy's `method` on all ranks; return or raise what it does on rank 0.

        All get the same `arguments`: they are broadcast to the ranks that wait in `execute_calls`.
        During the call `phase`, a text for people, is the present phase. Raise RuntimeError if a rank is
        lost.
        """
        with self._phases.enter(phase):
            broadcast((method, arguments))
            return getattr(self._policy, method)(*arguments)

    def update(self, batch: Batch, step: int) -> Update:
        """Train on the batch on all ranks; return the Update. `step` counts the Updates made before.

        The phase is "making an Update" meanwhile. Raise RuntimeError if a rank is lost.
        """
        made: Update = self._on_all_ranks(UPDATE, "update", batch, step)
        return made

    def save(self, folder: Path) -> None:
        """Write the training's state into the existing folder, for `load`; all ranks write their parts.

        The phase is "writing a checkpoint" meanwhile. Raise RuntimeError if a rank is lost.
        """
        self._on_all_ranks("writing a checkpoint", "save", folder)

    def load(self, folder: Path) -> None:
        """Restore the training's state that `save` wrote into the folder, on all ranks.

        The phase is "reading a checkpoint" meanwhile. Raise RuntimeError if a rank is lost.
        """
        self._on_all_ranks("reading a checkpoint", "load", folder)

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        """Write the weights into the folder as a Hugging Face model, with all ranks' parts.

        The phase is "writing weights" meanwhile. Raise NotFinite if a weight is NaN or infinite,
        RuntimeError if a rank is lost.
        """
        self._on_all_ranks("writing weights", "export", folder, form)

    def score(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities of each text's tokens (L,) after the first, (L - 1,), in nats.

        The phase is "scoring the probe" meanwhile. Raise RuntimeError if a rank is lost.
        """
        scored: list[np.ndarray] = self._on_all_ranks("scoring the probe", "score", texts)
        return scored

    def offload(self) -> None:
        """Move all that is on the devices to the CPU's memory, on all ranks, until `reload`.

        The phase is "leaving the device" meanwhile. Raise RuntimeError if a rank is lost.
        """
        self._on_all_ranks("leaving the device", "offload")

    def reload(self) -> None:
        """Move back to the devices, unchanged, what `offload` moved away, on all ranks.

        The phase is "coming back to the device" meanwhile. Raise RuntimeError if a rank is lost.
        """
        self._on_all_ranks("coming back to the device", "reload")

    def close(self) -> None:
        """Leave the process group on all ranks; `execute_calls` of the other ranks returns.

        Raise RuntimeError if a rank is lost.
        """
        self._on_all_ranks("closing the policy", "close")


def execute_calls(policy: TrainablePolicy) -> None:
    """Execute the calls that rank 0 broadcasts, on any other rank, up to and including `close`.

    `policy` is this rank's own. What its methods return is not used. Wait for each call, at most a day.
    Raise DeadlineExceeded if none comes, or the connection to rank 0 is lost. Raise also what a call
    itself raises.
    """
    method = ""
    while method != "close":
        try:
            method, arguments = broadcast(None)
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank {rank()} lost its connection to rank 0 ({error}). Rank 0's log has the reason; "
                "remove that cause, and start all ranks again."
            ) from error
        getattr(policy, method)(*arguments)
