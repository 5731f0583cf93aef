"""What limits a run, in one sentence for the person who watches it."""

import shlex
import time
from collections import deque
from collections.abc import Collection
from typing import Self

from penstock.common.broker.process_status import WorkerStatus
from penstock.common.monitor.overview import GONE_S, Overview
from penstock.common.phases import LEAVING, WAITING_FOR_GROUPS, WAITING_FOR_ROOM
from penstock.common.text import counted, short

_WINDOW_S = 16.0
_LITTLE, _MUCH, _BUSY = 0.1, 0.4, 0.8
_MANY_DEAD = 5


class Cause(str):
    """A sentence on what the run waits for. `missing` is the role without a process, or ""."""

    missing: str

    def __new__(cls, sentence: str, missing: str = "") -> Self:
        """Return the sentence as a cause."""
        cause = super().__new__(cls, sentence)
        cause.missing = missing
        return cause


class Fault(Cause):
    """A sentence that says that the run stands still until somebody acts."""


class LimitWatch:
    """Names what limits a run, from its overviews of the last seconds.

    Example: "The learner waits 61% of each step for groups: actors are the limit. One more would give
    about +50%, on cores or a device of its own."
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, bool]] = deque(maxlen=1000)
        self._ends = deque([(0, 0)], maxlen=1000)  # how many groups had ended, and died, at each look

    def describe(self, now: Overview) -> str:
        """Return the sentence for the overview `now`, which was read at this moment.

        It is a Fault if the run stands still, and a Cause if a role has no process.
        The learner's share of waiting is that of its newest steps. If the last one is long ago, the
        share is computed from the overviews of the last 16 s.
        """
        present = time.monotonic()
        self._samples.append((present, now.learner.phase == WAITING_FOR_GROUPS))
        while self._samples[0][0] < present - _WINDOW_S:
            self._samples.popleft()
        sampled = sum(waits for _, waits in self._samples) / len(self._samples)
        found = _standstill(now) or _missing(now) or self._dying(now) or _evaluating(now)
        return found or _slowest(now, _waiting_share(now, sampled))

    def _dying(self, now: Overview) -> str:
        """Return a Fault if at least five, and at least half, of the newest groups died; else "".

        The newest are ten or more. If fewer have ended, and at the first look, all count.
        """
        ended = sum(now.totals.get(name, 0) for name in ("trained", "filtered", "stale", "dead"))
        dead = now.totals.get("dead", 0)
        if ended < self._ends[-1][0]:  # a server that was emptied
            self._ends.clear()
            self._ends.append((0, 0))
        if ended > self._ends[-1][0]:
            self._ends.append((ended, dead))
        while len(self._ends) > 1 and ended - self._ends[1][0] >= 2 * _MANY_DEAD:
            self._ends.popleft()
        of, died = ended - self._ends[0][0], dead - self._ends[0][1]
        if died < _MANY_DEAD or 2 * died < of:
            return ""
        why = f"`queues dead {shlex.quote(now.folder)}` says why."
        return Fault(f"{died} of {of} groups died: a reward, a tool or the prompts fail. {why}")


def _waiting_share(now: Overview, sampled: float) -> float:
    """Return the learner's share of waiting for groups, 0 to 1: that of its steps, or `sampled`."""
    progress = now.progress
    if progress is None or progress.step_s <= 0:
        return sampled
    old_s = (now.now_ms - progress.at_ms) / 1000
    return sampled if old_s > 3 * progress.step_s + 5 else min(1.0, progress.wait_s / progress.step_s)


def _standstill(now: Overview) -> str:
    """Return a sentence if the run has ended, or a Fault if its learner cannot train; else ""."""
    learner, phase = now.learner, short(now.learner.phase)
    if now.state == "ended":
        return "The run has ended."
    if now.server_fault:
        return Fault(now.server_fault)
    if phase == LEAVING:
        return Fault("No learner runs. Nothing is lost: start it again to go on.", "learner")
    if now.heartbeat_s > GONE_S:
        who = f"{now.heartbeat_s:.0f} s: {short(learner.holder)} is stopped or killed."
        return Fault(f"No heartbeat from the learner for {who}", "learner")
    if phase == WAITING_FOR_ROOM:
        return Fault("The learner waits for room on the disk with the run's folder: delete files there.")
    if not now.version:
        return f"The learner starts (it is {phase or 'claiming the run'}): no weights are published yet."
    return ""


def _missing(now: Overview) -> str:
    """Return a Cause if no actor, or no rewarder for groups that wait, is running; else ""."""
    groups, is_first = now.streams["rollouts"].depth, not (now.progress and now.progress.step)
    if groups and not now.running("rewarder"):
        if is_first and not now.gone("rewarder"):
            to_score = f"{counted(groups, 'group')} to score."
            return Cause(f"The first rewarder has not joined yet; {to_score}", "rewarder")
        waiting = f"{counted(groups, 'group')} {'waits' if groups == 1 else 'wait'}"
        return _absence(now, "rewarder", f", and {waiting} to be scored")
    if now.running("actor"):
        return ""
    if is_first and not now.gone("actor"):
        return Cause("The first actor has not joined yet: vLLM takes a minute to start.", "actor")
    return _absence(now, "actor", "")


def _evaluating(now: Overview) -> str:
    """Return that the learner waits, while held-out questions are open, or that it ends; else ""."""
    asked, progress = now.streams.get("eval_tickets"), now.progress
    if asked and asked.depth and now.learner.phase == WAITING_FOR_GROUPS:
        return f"The learner waits for an evaluation: {counted(asked.depth, 'question')} left."
    if progress and 0 < progress.steps <= progress.step:
        return "All steps are made: the last evaluation and the final model are being finished."
    return ""


def _absence(now: Overview, role: str, consequence: str) -> Fault:
    """Return the sentence that no process of `role` runs, with the one that was seen last."""
    gone = now.gone(role)
    last = min(gone, key=lambda name: now.age_s(gone[name]), default="")
    seen = f" ({short(last)} was last seen {now.age_s(gone[last]):.0f} s ago)" if last else ""
    remedy = (
        f"start one with {_scale(now, role)}, elsewhere with `penstock up --only {role}`, or `{role}`."
    )
    return Fault(f"No {role} is running{seen}{consequence}: {remedy}", role)


def _scale(now: Overview, role: str) -> str:
    """Return the command that adds a process of `role` to the run, while it goes on."""
    return f"`queues scale {shlex.quote(now.folder)} {role}={len(now.running(role)) + 1}`"


def _slowest(now: Overview, waiting: float) -> str:
    """Return the sentence on the role that the others wait for.

    The learner waits for groups for the share `waiting` of its time, 0 to 1.
    """
    actors, rewarders = now.running("actor"), now.running("rewarder")
    idle = 1 - mean_busy(actors.values())
    waits = f"The learner waits {waiting:.0%} of each step for groups"
    groups = now.streams["rollouts"].depth
    crowd = now.progress.asked / 2 if now.progress else 1  # fewer groups come in one burst of an actor
    rewarders_are_busy = groups and waiting > _LITTLE and mean_busy(rewarders.values()) > _BUSY
    if rewarders_are_busy and (groups >= crowd or idle > _MUCH):
        return (
            f"{waits}: rewarders are the limit, with {counted(groups, 'group')} to score. Add one "
            f"with {_scale(now, 'rewarder')}, or raise REWARDER_WORKERS."
        )
    if min(waiting, idle) > _MUCH:
        return (
            f"{waits}, and actors wait {idle:.0%} of their time for tickets: the longest "
            "answers are the limit, or LEARNER_MAX_STALENESS."
        )
    if idle >= waiting:
        return (
            f"The learner is the limit: it waits {waiting:.0%} of each step for groups, and actors wait "
            f"{idle:.0%} of their time for tickets."
        )
    if not (now.progress and now.progress.step):
        return f"{waits}: actors are the limit so far."
    scoring = mean_busy(rewarders.values())
    gain = gain_of_one_more(len(actors), waiting, scoring)
    then = "; then rewarders are the limit" if gain < gain_of_one_more(len(actors), waiting) else ""
    return (
        f"{waits}: actors are the limit. One more would give about {gain:+.0%}, on cores or a device of "
        f"its own{then}."
    )


def gain_of_one_more(actors: int, waiting: float, scoring: float = 0.0) -> float:
    """Return by which part the run gets faster with one actor more than `actors`, which are all busy.

    `waiting` is the learner's share of waiting in a step, and `scoring` the rewarders' share of work, 0
    to 1. A step takes as long as the slowest of learner, rewarders and actors. Example: 1 actor, waiting
    0.3: the learner needs 0.7 of a step and two actors 0.5, so steps take 0.7 of the time: +43%.
    """
    return 1 / max(1 - waiting, min(scoring, 1.0), actors / (actors + 1)) - 1


def mean_busy(workers: Collection[WorkerStatus]) -> float:
    """Return the mean share of time, 0 to 1, in which the workers did not wait for work; 0 for none."""
    return sum(status.busy for status in workers) / len(workers) if workers else 0.0
