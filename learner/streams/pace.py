"""The pace that keeps open tickets within max_staleness: pure arithmetic on when they fall due.

A group joins a batch only if afterwards, for every k, at most k x size open tickets fall due within k
more steps. Credit alone does not bound the lag: without this an overtaken ticket is trained later than
max_staleness allows. A ticket due within 0 can be trained in the batch being formed, and in none later.
"""

from collections import Counter
from collections.abc import Mapping

from penstock.common.wire.ids import TicketId


def choose_in_pace(held: Mapping[TicketId, int], due: Counter[int], size: int) -> list[TicketId]:
    """Up to `size` held tickets for a batch, oldest arrivals first; takes them out of `due`.

    held maps tickets to the steps they fall due within, due counts the same over all open tickets.

    Example:
        >>> choose_in_pace({"train:2": 1, "train:0": 0}, Counter({0: 2, 1: 2}), size=2)
        ['train:0']
    """
    chosen: list[TicketId] = []
    for ticket, own in held.items():
        if len(chosen) == size:
            break
        due[own] -= 1
        # No more urgent than itself: others as urgent gain nothing if this one waits.
        if keeps_pace(due, own, size, room=size - len(chosen) - 1):
            chosen.append(ticket)
        else:
            due[own] += 1
    return chosen


def keeps_pace(due: Counter[int], below: int, size: int, room: int = 0) -> bool:
    """Whether for every k < below at most k x size tickets, and `room`, fall due within k steps."""
    waiting = 0
    for within in range(below):
        waiting += due[within]
        if waiting > within * size + room:
            return False
    return True
