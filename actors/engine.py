"""What the actor's loop needs of an inference engine; knows no engine in particular."""

import hashlib
from pathlib import Path
from typing import Protocol

from penstock.common.errors import EngineFailed, PenstockError
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Weights

WEIGHTS_FILE = "model.safetensors"


class WeightsRejected(EngineFailed):
    """The weights are not those that were announced; the engine still has the version before."""


class PromptRefused(PenstockError):
    """The engine cannot serve this one request, for instance because the prompt is too long."""


class Aborted(Exception):
    """The request was aborted; `partial` are the tokens sampled so far.

    A completion cut short has the finish reason "length"; one without any token is left out.
    """

    def __init__(self, request_id: str, partial: tuple[Rollout, ...] = ()) -> None:
        super().__init__(f"request {request_id} was aborted")
        self.partial = partial


class Engine(Protocol):
    """Samples completions under versioned weights that can change while requests are in flight."""

    @property
    def version(self) -> Version | None:
        """The version in use; None before the first was taken."""

    async def start(self, model: Path) -> None:
        """Load a model folder and get ready; raises EngineFailed."""

    async def stop(self) -> None:
        """End the engine and its processes."""

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int
    ) -> tuple[Rollout, ...]:
        """Sample completions of one prompt; raises Aborted, PromptRefused or EngineFailed."""

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` raises Aborted with the tokens so far."""

    async def take_weights(self, weights: Weights) -> None:
        """Go on with these weights, keeping requests in flight.

        Raises WeightsRejected before anything has changed, EngineFailed if the engine is broken.
        """

    def room(self) -> int:
        """Completions that can start right now."""

    def tokens_generated(self) -> int:
        """Tokens sampled since the start; stands still when the engine hangs."""


def verify_weights(weights: Weights) -> Path:
    """The folder of announced weights, if its bytes are those announced; raises WeightsRejected."""
    folder = Path(weights.path)
    try:
        found = hash_weights(folder)
    except OSError as error:
        raise WeightsRejected(
            f"the weights of version {weights.version} cannot be read: {error}; "
            "share the run's folder with this actor"
        ) from error
    if found != weights.hash:
        raise WeightsRejected(
            f"{folder / WEIGHTS_FILE} is not version {weights.version}: its hash is {found[:12]}, "
            f"{weights.hash[:12]} was announced"
        )
    return folder


def hash_weights(folder: Path) -> str:
    """SHA-256 of a model folder's weights; raises OSError."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
