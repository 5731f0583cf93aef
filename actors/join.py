"""Joining a run, and checking that the run is still the one that was joined."""

import asyncio
import threading

from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.errors import RunNotReady
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import Contract, describe_difference


async def join(view: RunView, timeout_s: float, stopping: threading.Event) -> Contract | None:
    """Wait for the run's contract and return it; None if `stopping` was set first.

    Raise DeadlineExceeded if no learner published one in time.
    """
    data = await asyncio.to_thread(wait_for_contract, view, timeout_s, stopping)
    return None if data is None else decode(data, Contract)


def has_ended(view: RunView, joined: Contract) -> bool:
    """Return whether the run is over.

    Raise RunNotReady if the run is no longer on the server, or has another contract than `joined`.
    """
    data = view.contract()
    if data is None:
        raise RunNotReady("the run is gone from the queue server")
    check_same(joined, decode(data, Contract))
    return view.ended()


def check_same(joined: Contract, published: Contract) -> None:
    """Raise RunNotReady, with the differences, unless the two contracts are the same."""
    if published.hash != joined.hash:
        raise RunNotReady(
            "the learner published another contract, start the actor again:\n"
            + describe_difference(joined, published)
        )
