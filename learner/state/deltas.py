"""Versions offered to other hosts together with what changed since the version before."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol

from penstock.common.errors import ConfigError
from penstock.common.files.hashing import hash_file
from penstock.common.log import get_logger
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import DELTA_FILE, Delta, Weights
from penstock.learner.state.queued_deltas import QueuedDeltas
from penstock.learner.state.versions import KEEP

_MOST_SHARE = 0.5
"""Largest part of a version that is worth a delta: float32 changes everywhere, for example."""

log = get_logger(__name__)


class Offer(Protocol):
    """Where other hosts fetch the run's files."""

    @property
    def is_used(self) -> bool:
        """Return whether another process has fetched a version, as far as is known."""

    def being_fetched(self) -> frozenset[str]:
        """Return the names of the folders of versions that are being fetched, as far as is known."""

    def offer(self, weights: Weights) -> Weights:
        """Make a version on this host ready to be fetched, and return its announcement.

        Raise StoreFailed if it cannot be put where it is fetched, ServerUnavailable.
        """


def with_deltas(
    offer: Offer | None, wanted: Literal["auto", "true", "false"], contract: Contract,
    queued: QueuedDeltas | None = None,
) -> Offer | None:  # fmt: skip
    """Return the offer, together with deltas if these are wanted (LEARNER_PUBLISH_DELTAS).

    Adapters have none. With "auto" there are deltas in bfloat16, once a version was fetched. They are
    put on the queue server too by `queued`. Raise ConfigError for "true" without numba or zstandard;
    with "auto" that is logged.
    """
    if offer is None or wanted == "false" or contract.adapter:
        return offer
    always = wanted == "true"
    if not (always or contract.dtype == "bfloat16") or not _can_make_deltas(always):
        return offer
    return OfferWithDeltas(offer, queued, always)


def _can_make_deltas(required: bool) -> bool:
    """Return whether the packages for deltas are here. Raise ConfigError if not, and `required`."""
    try:
        import_module("penstock.common.transfer.delta")
    except ImportError as error:
        fault = f"there are no deltas of the weights, as a package is missing here: {error}"
        if required:
            raise ConfigError(f"LEARNER_PUBLISH_DELTAS=true: {fault}") from error
        log.warning(f"Actors fetch whole versions: {fault}")
        return False
    return True


class OfferWithDeltas:
    """An offer whose announcements have the deltas of the newest versions, 4 at most.

    A version's delta is written beside its file when it is offered, and put on the queue server if there
    is room (`queued`). Unless `always`, that begins once a version was fetched: it takes time.
    """

    def __init__(self, offer: Offer, queued: QueuedDeltas | None = None, always: bool = False) -> None:
        self._offer, self._queued, self._always = offer, queued, always
        self._last: Weights | None = None

    @property
    def is_used(self) -> bool:
        """Return whether another process has fetched a version."""
        return self._offer.is_used

    def being_fetched(self) -> frozenset[str]:
        """Return the names of the folders of versions that are being fetched."""
        return self._offer.being_fetched()

    def offer(self, weights: Weights) -> Weights:
        """Write the delta of a version that is on this host, and offer both.

        Raise what the offer's own `offer` raises, or with `queued` Connection.execute's errors.

        Without a delta, such as for the learner's first version, the next ones begin with this version.
        """
        if self._last is None or self._last.version != weights.version:
            self._last = replace(weights, deltas=self._deltas(weights))
        return self._offer.offer(replace(weights, deltas=self._last.deltas))

    def _deltas(self, weights: Weights) -> tuple[Delta, ...]:
        """Write what changed since the version that was offered last, and return the newest deltas.

        None if there was no version, or its delta is too large. A fault is logged: the version is
        fetched whole then.
        """
        from penstock.common.transfer.delta import write_delta

        is_wanted = self._always or self._offer.is_used
        if self._last is None or self._last.hash != weights.parent or not is_wanted:
            return ()
        old, new = (_tensor_paths(one) for one in (self._last, weights))
        target = Path(weights.path) / DELTA_FILE
        try:
            if size := write_delta(old, new, target, most=int(_MOST_SHARE * weights.size)):
                delta = Delta(weights.version, self._last.hash, hash_file(target), size)
                if self._queued:
                    self._queued.put(delta, target)
                return (*self._last.deltas, delta)[-KEEP:]
            target.unlink(missing_ok=True)
        except OSError as error:
            log.warning(f"Version {weights.version} is offered without a delta: {error}.")
            target.unlink(missing_ok=True)
        return ()


def _tensor_paths(weights: Weights) -> list[Path]:
    """Return the files of a version that have tensors."""
    return [Path(weights.path) / one.name for one in weights.tensor_files]
