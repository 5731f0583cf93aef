"""Joining a run, and noticing that it is no longer the one that was joined."""

import asyncio
import threading

from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.errors import RunNotReady
from penstock.common.wire.contract import Contract, describe_difference, read_contract


async def join(view: RunView, timeout_s: float, stopping: threading.Event) -> Contract | None:
    """Wait for the run's contract; None if told to stop first. Raises DeadlineExceeded."""
    data = await asyncio.to_thread(wait_for_contract, view, timeout_s, stopping)
    return None if data is None else read_contract(data)


def has_ended(view: RunView, joined: Contract) -> bool:
    """Whether the run is over; raises RunNotReady when it is not the run that was joined."""
    data = view.contract()
    if data is None:
        raise RunNotReady("the run is gone from the queue server")
    check_same(joined, read_contract(data))
    return view.ended()


def check_same(joined: Contract, published: Contract) -> None:
    """Raise RunNotReady, with the difference, when the learner published another contract."""
    if published.hash != joined.hash:
        raise RunNotReady(
            "the learner published another contract, start the actor again:\n"
            + describe_difference(joined, published)
        )
