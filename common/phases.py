"""The phases of a process: named once, for its heartbeat, its metrics and a profiler."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Phases:
    """The phase that a process is in, and the seconds that a step spent in each phase.

    `name` is the present phase, at first "starting". `progress` grows when a phase begins, ends or
    polls: a process whose `progress` stays the same hangs. `trace` opens a profiler's range with the
    phase's name, such as `torch.profiler.record_function`.

    Example: a step that enters "making an Update" for 2 s and later for 1 s has `seconds("making an
    Update") == 3.0`.
    """

    def __init__(self, trace: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self.name = "starting"
        self.progress = 0
        self._trace = trace
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._step_began = time.monotonic()

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
        self.name = name
        try:
            with self._trace(name):
                yield
        finally:
            self._seconds[name] += time.monotonic() - began
            self.name = before
            self.poll()

    def poll(self) -> None:
        """Note that the phase makes progress: `progress` grows by 1. A wait calls this at each poll."""
        self.progress += 1

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
