"""The inference engine as the actor's loop sees it; nothing here depends on a particular engine."""

import hashlib
from pathlib import Path
from typing import Protocol

from penstock.common.errors import EngineFailed, PenstockError
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Weights

WEIGHTS_FILE = "model.safetensors"
_WEIGHTS_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth"}


class WeightsRejected(EngineFailed):
    """The weights are not the announced ones, or cannot be read. The engine keeps its version."""


class PromptRefused(PenstockError):
    """The engine cannot serve this one request, for example because the prompt is too long."""


class Aborted(Exception):
    """A request was aborted; `partial` holds the completions up to that moment that have a token.

    A completion that was cut short has the finish reason "length".
    """

    def __init__(self, request_id: str, partial: tuple[Rollout, ...] = ()) -> None:
        super().__init__(f"request {request_id} was aborted")
        self.partial = partial


class Engine(Protocol):
    """Samples completions. Its versioned weights can change while requests are in flight."""

    @property
    def version(self) -> Version | None:
        """The version in use; None before `take_weights` was called for the first time."""

    async def stop(self) -> None:
        """End the engine and its processes."""

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int
    ) -> tuple[Rollout, ...]:
        """Return `num_generations` completions of one prompt.

        Raise Aborted after `abort`, PromptRefused if only this request is at fault, EngineFailed if the
        engine is broken, MalformedMessage if a completion is no Rollout.
        """

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` raises Aborted with the completions so far."""

    async def take_weights(self, weights: Weights) -> None:
        """Change to these weights. Requests in flight continue with them.

        Raise WeightsRejected before anything has changed, EngineFailed if the engine is broken.
        """

    def room(self) -> int:
        """Return how many more completions can start now."""

    def tokens_generated(self) -> int:
        """Return the number of tokens sampled since the start; constant while the engine hangs."""


def verify_weights(weights: Weights) -> Path:
    """Return the folder of weights. Raise WeightsRejected unless the file has the announced hash.

    Raise WeightsRejected as well if the folder holds other weights, whose hash nobody announced: an
    engine loads all that it finds.
    """
    folder = Path(weights.path)
    try:
        found = hash_weights(folder)
        others = [path.name for path in folder.iterdir() if path.suffix in _WEIGHTS_SUFFIXES]
    except OSError as error:
        raise WeightsRejected(
            f"the weights of version {weights.version} cannot be read: {error}; "
            "share the run's folder with this actor, and name its parent in RUN_DIR"
        ) from error
    if found != weights.hash:
        raise WeightsRejected(
            f"{folder / WEIGHTS_FILE} is not version {weights.version}: its hash is {found[:12]}, the "
            f"announced hash is {weights.hash[:12]}; share the run's folder with this actor unchanged"
        )
    others.remove(WEIGHTS_FILE)
    if others:
        raise WeightsRejected(
            f"{folder} holds {', '.join(sorted(others))[:200]} beside {WEIGHTS_FILE}, which has no "
            "announced hash; remove what the learner did not write"
        )
    return folder


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 of a model folder's weights, in hex. Raise OSError if they cannot be read."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
