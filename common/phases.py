"""The phases of a process, for its heartbeat, its metrics and a profiler."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

WAITING_FOR_GROUPS = "waiting for groups"
"""The learner's phase while it waits for groups or for the answers of an evaluation."""

WAITING_FOR_ROOM = "waiting for room on the disk"
"""The learner's phase while a full disk takes none of its writes."""

READING_DATA, CLAIMING, LEAVING = "reading data and model", "claiming the folder", "leaving"
WAITING_FOR_DEVICE = "waiting for the device"
SETUP_PHASES = frozenset({"", READING_DATA, CLAIMING, WAITING_FOR_ROOM, WAITING_FOR_DEVICE, LEAVING})
"""The phases in which the contract on the queue server may still be an earlier learner's."""


@dataclass(slots=True)
class PhaseCost:
    """Seconds that a phase took, and seconds of CPU time that the process used meanwhile."""

    seconds: float = 0.0
    cpu_s: float = 0.0


class Phases:
    """The phase that a process is in, and the seconds that a step spent in each phase.

    `name` is the present phase, at first "starting". `progress` grows when a phase begins, ends or
    polls: a process whose `progress` stays the same hangs. Each time `check` is called, which may raise
    an error that ends the process. `trace` opens a profiler's range with the
    phase's name, such as `torch.profiler.record_function`. `take_profile` tells where all time went.

    Example: a step that enters "making an Update" for 2 s and later for 1 s has `seconds("making an
    Update") == 3.0`.
    """

    def __init__(self, trace: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self.name = "starting"
        self.progress = 0
        self.check: Callable[[], None] = lambda: None
        self._trace = trace
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._step_began = time.monotonic()
        self._profile: dict[str, PhaseCost] = {}
        self._counted_to = (time.monotonic(), time.process_time())

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Be in the phase `name` during the block, then in the previous one again, also after an error.

        The seconds of the block are counted, in a profiler's range of this name. `progress` grows by 1
        at the beginning and at the end. The seconds of a phase within another phase count for both. A
        phase directly within itself counts once: the inner block only adds 1 to `progress`.
        """
        self.poll()
        if name == self.name:
            yield
            return
        before, began = self.name, time.monotonic()
        self.change_to(name)
        try:
            with self._trace(name):
                yield
        finally:
            self._seconds[name] += time.monotonic() - began
            self.change_to(before)
            self.poll()

    def change_to(self, name: str) -> None:
        """Count the time since the last change for the present phase; then `name` is the present one.

        `enter` does this for a block. A loop that has no blocks calls this at each turn.
        """
        now = (time.monotonic(), time.process_time())
        cost = self._profile.setdefault(self.name, PhaseCost())
        cost.seconds += now[0] - self._counted_to[0]
        cost.cpu_s += now[1] - self._counted_to[1]
        self._counted_to, self.name = now, name

    def take_profile(self) -> dict[str, PhaseCost]:
        """Return by phase what it cost since the last call, or since this object was created.

        Every moment counts for one phase alone, the innermost one: the seconds add up to the time since
        the last call. CPU time includes all threads of the process.
        """
        self.change_to(self.name)
        taken, self._profile = self._profile, {}
        return taken

    def poll(self) -> None:
        """Note that the phase makes progress: `progress` grows by 1. A wait calls this at each poll.

        Raise what `check` raises, PenstockError if a thread that the process needs has died.
        """
        self.progress += 1
        self.check()

    def begin_step(self) -> None:
        """Count the seconds of the step (`step_s`) and of all its phases (`seconds`) from 0 again.

        A phase that was entered before counts for the new step in full, when it ends.
        """
        self._seconds.clear()
        self._step_began = time.monotonic()

    def seconds(self, name: str) -> float:
        """Return the seconds that the step has spent in the phase `name`, 0 if it was not entered.

        A phase counts when it ends: the present one is not in the sum yet.
        """
        return self._seconds.get(name, 0.0)

    @property
    def step_s(self) -> float:
        """Seconds since the last `begin_step`, or since this object was created if there was none."""
        return time.monotonic() - self._step_began


def costs_by_name(role: str, profile: Mapping[str, PhaseCost]) -> dict[str, float]:
    """Return seconds and CPU seconds of a role's phases, by names of metrics.

    Example: the learner's phase "running forward" has learner/running_forward_s and .._cpu_s.
    """
    costs: dict[str, float] = {}
    for phase, cost in profile.items():
        name = f"{role}/{phase.replace(' ', '_')}"
        costs |= {f"{name}_s": cost.seconds, f"{name}_cpu_s": cost.cpu_s}
    return costs
