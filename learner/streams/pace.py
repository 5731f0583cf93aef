"""The pace: which groups a batch may take so that no open ticket exceeds max_staleness. Pure.

A ticket due within 0 steps can be trained in the batch that is being formed, and in none later. A batch
takes a group only if afterwards, for every k, at most k x size open tickets are due within k steps.
Example: batches of 2, and 3 tickets due within 1 step: one of them would be too old in the end, so the
batch takes one of the 3 first. The credit alone does not bound the staleness.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from penstock.common.wire.ids import TicketId


def choose_in_pace(held: Mapping[TicketId, int], due: Counter[int], size: int) -> list[TicketId]:
    """Return up to `size` held tickets for a batch, in order of arrival, and remove them from `due`.

    A ticket is taken if all more urgent ones can still be trained in time. `held` maps tickets to the
    steps they are due within (0: in this batch), and `due` counts all open tickets by these steps.
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
    """Return whether for every k < `below` at most k x size + room tickets are due within k steps.

    `due` counts tickets by the steps they are due within, `size` is the groups of a batch, and `room` is
    the number of further tickets that the present batch takes. With `below` 0 return True.
    """
    waiting = accumulate(due[within] for within in range(below))
    return all(count <= within * size + room for within, count in enumerate(waiting))
