"""`penstock autoscale`: as many actors as keep the learner from waiting, by the waits that are measured.

    the learner waits too much      more actors, at once as many as the wait suggests
    it does not                     half the way down to the largest number that was too small
    no number is left between       stay

A learner that waits, but no more than the actors wait for tickets, needs no more of them: they would
wait too. Its wait then counts as none. Rewarders may be the limit, or the longest answers.

A number that was too small is not tried again while the load lasts: until the learner would take a fifth
fewer tokens per second than then, and no more than that number made. If it is tried again for nothing,
the load has to fall by another fifth. So the search ends, and two numbers do not alternate.

Example: --min 1 --max 8, and 3 actors are enough. From 1 the learner waits 60% of each step, which
suggests 3. With 3 it waits 5%. 2 are tried, are too few, and 3 stay.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pydantic import Field, PrivateAttr, model_validator

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.process_status import LearnerProgress
from penstock.common.broker.run_view import RunView
from penstock.common.broker.scale import Scale
from penstock.common.errors import ConfigError, NotPermitted, RunNotReady, ServerUnavailable
from penstock.common.monitor.limit import mean_busy
from penstock.common.monitor.overview import Overview, read_overview
from penstock.common.queues import QueueCommand
from penstock.common.role import stop_on_signals
from penstock.common.text import one_line
from penstock.deploy.devices import ACTOR

_LOOK_EVERY_S = 1.0
_MEAN_STEPS = 5
"""Steps whose means a LearnerProgress has."""
_LOOKS, _RATES = 10, 60
"""Looks, one per second, of whose waits a decision takes the mean, and the most of whose rates."""
_START_LOOKS = 600
"""Looks after which an actor that has not joined is no longer waited for: it may never come."""
_SAME_LOAD = 0.8
_LEAST_BUSY = 0.05


@dataclass(slots=True)
class Rule:
    """Which number of actors to try next, from `least` to `most`, so that the wait is below `target`.

    `too_small` has numbers that were tried and too small, each with the load from which on it is so.
    """

    least: int
    most: int
    target: float
    too_small: dict[int, float] = field(default_factory=dict)
    tried_again: int = 0

    def next(self, actors: int, wait: float, load: float, others: int = 0) -> int:
        """Return the number to try after `actors`, or `actors` to stay.

        `wait` is the learner's share of waiting, 0 to 1. `load` is how many tokens per second the
        learner would take if it never waited. `others` work beside, on other machines. They are counted
        in `too_small`, and not in `least` and `most`.
        """
        return self._next(actors + others, wait, load, others) - others

    def _next(self, actors: int, wait: float, load: float, others: int) -> int:
        """Do the same where `actors` and the result are all that work, `others` among them."""
        least, most = self.least + others, self.most + others
        if wait >= self.target:
            enough = load * min(_SAME_LOAD, (1 - wait) / (1 - self.target))
            lowered = _SAME_LOAD if actors == self.tried_again else 1.0
            self.too_small[actors] = lowered * min(enough, self.too_small.get(actors, load))
            wanted = actors * (1 - self.target) / max(1 - wait, _LEAST_BUSY)
            return min(most, max(least, actors + 1, math.ceil(wanted)))
        if actors > most:
            return most
        known = [n for n, then in self.too_small.items() if n < actors and load >= then]
        fewer = max(least, (max(known, default=least - 1) + actors + 1) // 2)
        self.tried_again = fewer if fewer < actors and fewer in self.too_small else 0
        return fewer


class Measuring:
    """Lets `rule` decide, each time that the wait with the present number of actors is known.

    Steps that began with other actors do not count, nor do those whose groups were asked for then, nor,
    for ten minutes, those that are made while actors start. A wait that is a little above the target
    counts if two measures in a row have it.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._present: tuple[int, ...] = ()  # as `_note_present` has it
        self._from_step = self._looks = 0
        self._waits: list[tuple[float, float]] = []  # the learner's share, and the actors'
        self._rates: deque[float] = deque(maxlen=_RATES)  # of all actors together: these vary most
        self._was_over = False

    def look(
        self, actors: int, rates: Sequence[float], progress: LearnerProgress, others: int = 0,
        idle: float = 0.0,
    ) -> int | None:  # fmt: skip
        """Return the number of actors to ask for after a look at the run, None to go on as before.

        `actors` is how many `penstock up` keeps running. `rates` has the tokens per second of each that
        has joined, `others` on other machines, and `idle` their mean share of waits for tickets, 0 to 1.
        A number out of bounds is changed at once: without an actor there is no step to wait for.
        """
        if (within := min(self._rule.most, max(self._rule.least, actors))) != actors:
            return within
        joined = len(rates) - others
        self._note_present((actors, joined, others), progress)
        self._rates.append(sum(rates))
        if progress.step < self._from_step or progress.step_s <= 0:
            return None
        self._waits.append((min(1.0, progress.wait_s / progress.step_s), idle))
        is_due = len(self._waits) >= _LOOKS
        return self._decide(actors, min(actors, joined), others) if is_due else None

    def _note_present(self, present: tuple[int, int, int], progress: LearnerProgress) -> None:
        """Forget the waits that were measured if `present` has changed, or while actors start.

        `present` is how many actors `penstock up` keeps running, how many of them have joined, and how
        many run on other machines.
        """
        actors, joined, _ = present
        self._looks = self._looks + 1 if self._present == present else 0
        if self._looks == 0 or (joined < actors and self._looks < _START_LOOKS):
            self._present = present
            self._from_step = progress.step + _MEAN_STEPS + 1 + math.ceil(progress.staleness)
            self._waits, self._was_over = [], False
            self._rates.clear()

    def _decide(self, actors: int, joined: int, others: int) -> int | None:
        """Return how many to ask for by the mean of the waits, which are then forgotten; None to stay.

        `actors` is how many are asked for now, `joined` how many of these work, and `others` how many
        work on other machines. The rule's change for the joined actors is added to `actors`, so an actor
        that works does not end in place of one that never joined: of 8 with 4 joined, 5 would end three.
        """
        (wait, idle), rate = map(fmean, zip(*self._waits, strict=True)), fmean(self._rates)
        self._waits = []
        load = rate / max(1 - wait, _LEAST_BUSY)
        wait = wait if wait > idle else 0.0
        is_over = wait >= self._rule.target
        unsure = is_over and not self._was_over and wait < 2 * self._rule.target
        self._was_over = is_over
        more = self._rule.next(joined, wait, load, others) - joined
        wanted = min(self._rule.most, actors + more)
        return None if unsure or wanted == actors else wanted


class Autoscale(QueueCommand):
    """Keep as many actors as the learner needs under `penstock up`, until the run ends or Ctrl-C.

    The smallest number from --min to --max is looked for whose wait is below the target.
    """

    least: int = Field(1, ge=1, validation_alias="min", description="fewest actors")
    most: int = Field(..., ge=1, validation_alias="max", description="most actors")
    target_wait: float = Field(
        0.1, gt=0, lt=1, description="share of each step that the learner may wait for groups"
    )
    host: str = Field("", description="host or name of the `penstock up`, if there are several")
    _awaited: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _in_order(self) -> "Autoscale":
        """Return self. Raise ValueError if --min is above --max."""
        if self.least > self.most:
            raise ValueError(f"--min {self.least} is above --max {self.most}: expected at most that")
        return self

    def ask(self, connection: Connection) -> int:
        """Look at the run each second, and ask for actors; return 0 at its end, or when told to stop.

        Print a line for each change. Raise ConfigError without the one `penstock up`, or without the
        right to ask, and ServerUnavailable if the server goes away before the run's last step. Both are
        waited for, for RUN_JOIN_TIMEOUT_S, once they were there. So is the run, from the beginning: then
        raise RunNotReady.
        """
        measuring = Measuring(Rule(self.least, self.most, self.target_wait))
        stopping, began = stop_on_signals(), time.monotonic()
        made_all, found_at, view = False, -math.inf, RunView(connection, Keys(self.run.name))
        while not stopping.wait(_LOOK_EVERY_S):
            try:
                now = read_overview(connection, self.run.name)
                if now.state == "ended" and view.ended():  # another client may have written the state
                    break
                if now.progress:
                    made_all = now.progress.step >= now.progress.steps
                    self._look(connection, measuring, now, now.progress)
                    found_at = time.monotonic()
            except RunNotReady as error:  # the learner starts
                self._await_run(error, max(began, found_at))
            except NotPermitted:  # a ConfigError that waiting does not mend
                raise
            except (ConfigError, ServerUnavailable):
                if made_all:
                    break
                if time.monotonic() - found_at > self.run.join_timeout_s:
                    raise
                connection = self._connect_again(connection)
                view = RunView(connection, Keys(self.run.name))
        return 0

    def _await_run(self, error: RunNotReady, since: float) -> None:
        """Print once that the run is waited for. Raise the error after RUN_JOIN_TIMEOUT_S of that."""
        if time.monotonic() - since > self.run.join_timeout_s:
            raise error
        if not self._awaited:
            self._awaited = True
            print(one_line(f"Waiting for run {self.run.name}: {error}"), flush=True)

    def _connect_again(self, connection: Connection) -> Connection:
        """Return a connection to the server's present address, which another start changes.

        Without a server it is the old one, closed.
        """
        connection.close()
        with contextlib.suppress(ConfigError, ServerUnavailable):
            return self.connect()
        return connection

    def _look(
        self, connection: Connection, measuring: Measuring, now: Overview, progress: LearnerProgress
    ) -> None:
        """Ask for another number of actors if it is time to. Raise as `ask`."""
        scale = Scale(connection, Keys(self.run.name))
        name = scale.choose(self.host, ACTOR)
        if (status := scale.running().get(name)) is None:
            return  # it has left since
        actors = status.processes.get(ACTOR, 0)
        running = now.running(ACTOR).values()
        others = sum(one.host != status.host for one in running)
        idle = 1 - mean_busy(running)
        wanted = measuring.look(actors, [one.rate for one in running], progress, others, idle)
        if wanted not in (None, actors, scale.requests(name).get(ACTOR)):
            share = progress.wait_s / max(progress.step_s, progress.wait_s, 1e-9)
            scale.request(name, ACTOR, wanted)
            change = f"{name}: {actors} -> {wanted} actors, as the learner waits {share:.0%}."
            print(one_line(change), flush=True)
