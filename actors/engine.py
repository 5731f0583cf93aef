"""The inference engine as the actor's loop sees it; nothing here depends on a particular engine."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol, TypeVar

from penstock.common.errors import EngineFailed, PenstockError
from penstock.common.files.hashing import hash_file
from penstock.common.files.reading import DAMAGE, explain, parse_json
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import (
    INDEX_FILE,
    WEIGHTS_FILE,
    Float32s,
    Int32s,
    Rollout,
    Sampling,
    Weights,
)

Result = TypeVar("Result")

_WEIGHTS_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


class WeightsRejected(EngineFailed):
    """The weights are not the announced ones, or cannot be read. The engine keeps its version."""


class PromptRefused(PenstockError):
    """The engine cannot serve this one request, for example because the prompt is too long."""


class Aborted(Exception):
    """The request `request_id` was aborted. `partial` has its completions, in order of their seeds.

    One that was cut short has the finish reason "cut", one without a token is None. () means that there
    is nothing to keep. `lost` counts the tokens that were sampled and are not in `partial`.
    """

    def __init__(self, request_id: str, partial: tuple[Rollout | None, ...] = (), lost: int = 0) -> None:
        super().__init__(f"request {request_id} was aborted")
        self.partial = partial
        self.lost = lost


class Engine(Protocol):
    """Samples completions. Its versioned weights can change while requests are in flight."""

    @property
    def version(self) -> Version | None:
        """Return the version whose weights are in use; None until `take_weights` has succeeded once."""

    async def stop(self) -> None:
        """End the engine and its processes; it cannot be used afterwards. Call this once."""

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int,
        since: Version | None = None,
    ) -> tuple[Rollout, ...]:  # fmt: skip
        """Return `num_generations` completions of the prompt `prompt_ids` (P,), in order of their seeds.

        `request_id` is the name of the request for `abort`; no other request in flight has it.
        Completion i gets the seed `sampling.seed` + i. `since` is the version that sampled the first
        turn of a conversation that the prompt continues: keys and values computed since then may be
        used; None: only those of the weights in use. Wait until all have ended. Raise Aborted after
        `abort`, PromptRefused if only this request is at fault, EngineFailed if the engine is broken,
        MalformedMessage if one is no Rollout.
        """

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` raises Aborted with the completions so far.

        Nothing happens if no request in flight has this id.
        """

    async def take_weights(self, weights: Weights, again: bool = False) -> None:
        """Verify published weights, load them, and label the tokens that are sampled later with them.

        Weights that are loaded already are loaded once more only if `again`. Requests in flight wait
        meanwhile, and continue with the new weights. `version` is theirs then. Raise WeightsRejected,
        before anything has changed, if the files are not the announced ones; if one is deleted later,
        `version` is None, and all wait for the next weights. Raise EngineFailed if the engine is broken.
        """

    async def score(self, request_id: str, token_ids: Int32s) -> Float32s:
        """Return the log-probabilities of a text's tokens (L,) after the first, (L - 1,), in nats.

        They are those of the weights in use, at temperature 1; nothing cached is used. `request_id` is
        of no other request in flight. Raise PromptRefused if only this request is at fault, such as for
        its length, EngineFailed if the engine is broken.
        """

    async def sleep(self, level: int) -> None:
        """Free the device's memory until `wake`; nothing may be in flight.

        Level 1 keeps the weights in the CPU's memory. Level 2 drops them: `version` is None until
        `take_weights`, which comes after `wake`. Raise EngineFailed if the engine is broken.
        """

    async def wake(self) -> None:
        """Take the device's memory again after `sleep`. Raise EngineFailed if the engine is broken."""

    def room(self) -> int:
        """Return how many more completions can start now; 0 or less if none can."""

    def tokens_generated(self) -> int:
        """Return the number of tokens sampled since the start; it stays equal while the engine hangs."""

    def prefix_cache(self) -> tuple[int, int]:
        """Return how many prompt tokens had cached keys and values since the start, and how many not."""


async def within_limit(change: Awaitable[Result], limit_s: float, what: str) -> Result:
    """Return what `change`, of an engine, returns. Raise EngineFailed after `limit_s` seconds.

    The limit is ACTOR_START_TIMEOUT_S. `what` completes the error's "the engine did not ..".
    """
    try:
        async with asyncio.timeout(limit_s):
            return await change
    except TimeoutError as error:
        raise EngineFailed(
            f"the engine did not {what} within {limit_s:g} s (ACTOR_START_TIMEOUT_S): start the actor "
            "again, or raise the setting"
        ) from error


def verify_weights(weights: Weights) -> Path:
    """Return the folder of published weights, `weights.path`, after checking its files.

    Raise WeightsRejected if a file cannot be read or has another hash than the announced one, if the
    index of several names others, or if the folder holds another file of weights, whose hash nobody
    announced: an engine loads all that it finds.
    """
    folder = Path(weights.path)
    found, others = _look_at(weights, folder)
    for one in weights.files:
        if found[one.name] != one.hash:
            raise WeightsRejected(
                f"{folder / one.name} is not of version {weights.version}: its hash is "
                f"{found[one.name][:12]}, the announced hash is {one.hash[:12]}; share the run's folder "
                "with this actor unchanged"
            )
    if others:
        raise WeightsRejected(
            f"{folder} holds {', '.join(others)[:200]} beside {weights.files[0].name}, expected no "
            "other file of weights; remove what the learner did not write"
        )
    _check_index(weights, folder)
    return folder


def _look_at(weights: Weights, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the hash of each announced file in a folder, and the names of other files of weights there.

    Raise WeightsRejected if an announced file cannot be read.
    """
    try:
        found = {one.name: hash_weights(folder, one.name) for one in weights.files}
        every = {path.name for path in folder.iterdir() if path.name.endswith(_WEIGHTS_SUFFIXES)}
    except OSError as error:
        remedy = "share the run's folder with this actor, and set RUN_DIR to its parent folder"
        if isinstance(error, FileNotFoundError) and folder.parent.is_dir():
            remedy = "a newer version has replaced them, and is taken when it is announced"
        cannot = f"the weights of version {weights.version} cannot be read"
        raise WeightsRejected(f"{cannot}: {error}; {remedy}") from error
    return found, sorted(every - found.keys())


def _check_index(weights: Weights, folder: Path) -> None:
    """Raise WeightsRejected unless the index of several files names all of them, and no others.

    An engine leaves out, without a word, a file that the index does not name.
    """
    if not weights.shards:
        return
    try:
        named = set(parse_json((folder / INDEX_FILE).read_bytes())["weight_map"].values())
    except (OSError, *DAMAGE) as error:
        raise WeightsRejected(f"{folder / INDEX_FILE} cannot be read: {explain(error)}") from error
    if named != {one.name for one in weights.tensor_files}:
        raise WeightsRejected(
            f"{folder / INDEX_FILE} does not name the {len(weights.tensor_files)} files of version "
            f"{weights.version} and no others: see who else writes to the run's folder"
        )


def hash_weights(folder: Path, name: str = WEIGHTS_FILE) -> str:
    """Return the hash of a folder's file of weights, in hex. Raise OSError if it cannot be read."""
    return hash_file(folder / name)
