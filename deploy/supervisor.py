"""Starts a run's processes, restarts those that die, and ends the run in order.

    running    a process that dies is started again after a growing wait
    leaving    the learner has finished; actors and rewarders notice it and exit by themselves
    stopping   SIGTERM, then SIGKILL: to learner and workers at once, then to the server

A run ends when the learner exits with 0, when a process exits with a code that a restart cannot help,
when an essential service fails too often in a row, or by `stop()` or `leave()`. While it goes on,
`ask()` changes how many actors or rewarders there are.
"""

import errno
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.common.deadline import Deadline
from penstock.common.errors import FLEET_NEVER_RESTARTED, NEVER_RESTARTED, ServerUnavailable
from penstock.deploy.child import Child, Report, Service, describe_end
from penstock.deploy.devices import ACTOR, LEARNER, DevicePlan, Gpus, variables_of

LEARNER_STAGE, WORKER_STAGE, SERVER_STAGE = 0, 1, 2
_COMMAND_NOT_FOUND = frozenset({126, 127})
_POLL_S = 0.05
_REPORT_EVERY_S = 10.0
_NO_ROOM_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, and how many failures in a row an essential service may have.

    The wait before a restart doubles from `first_backoff_s` to `longest_backoff_s` (1, 2, 4, ... 30 s),
    and starts over when a process ran for `settled_s`. A service is waited for at most `ready_s`.
    After the learner and the roles here have ended, the server stays for `linger_s`. A process that is
    told to end is killed after `terminate_s`, the learner, which writes a checkpoint, after `save_s`.
    """

    first_backoff_s: float = 1.0
    longest_backoff_s: float = 30.0
    settled_s: float = 60.0
    leave_s: float = 60.0
    linger_s: float = 0.0
    ready_s: float = 600.0
    terminate_s: float = 30.0
    save_s: float = 600.0
    failures: int = 5


class Supervisor:
    """Runs services until the run is over: `counts[name]` processes of each, 1 if not named.

    All processes get the variables `environment`, and see the GPUs that `devices` plans for them, all
    without a plan. `report` is called from several threads, with every line of output, start, end and
    delay. `limits` has the times to wait, by default those of Limits.

    Example:
        Supervisor([Service("learner", ("learner",), stage=0)], dict(os.environ), print).run()
    """

    def __init__(
        self,
        services: Sequence[Service],
        environment: Mapping[str, str],
        report: Callable[[Report], None],
        counts: Mapping[str, int] | None = None,
        limits: Limits | None = None,
        devices: DevicePlan | None = None,
    ) -> None:
        self._devices = devices or DevicePlan({}, {}, Gpus(()))
        given = {one.name: variables_of(one.devices, environment) for one in self._devices.processes}
        self._scaled = {one.name: one for one in services if one.stage == WORKER_STAGE}
        self._asked: dict[str, int] = {}
        self._short: dict[str, int] = {}  # by role the count for which devices were missing
        self.children = [
            Child(service, number, report, given.get(f"{service.name}.{number}"))
            for service in services
            for number in range(1, (counts or {}).get(service.name, 1) + 1)
        ]
        self._environment = environment
        self._report = report
        self._limits = limits or Limits()
        self.goes_on = any(service.name == LEARNER for service in services)
        """Whether a worker that ends with 0 is started again, as the run may go on without it."""
        final = NEVER_RESTARTED if self.goes_on else FLEET_NEVER_RESTARTED
        self._final_codes = final | _COMMAND_NOT_FOUND
        self._phase: Literal["running", "leaving", "stopping"] = "running"
        self._stops, self._left = 0, False
        self._learner_code = 0
        self._failed_code: int | None = None
        self._blocked = Deadline(self._limits.ready_s)

    def stop(self, at_once: bool = False) -> None:
        """Make `run` end its processes in order, by SIGTERM; a second call `at_once` kills them.

        Return at once, without waiting for their end. Safe in signal handlers and threads.
        """
        self._stops += at_once or not self._stops

    def ask(self, role: str, count: int) -> None:
        """Ask for `count` processes of a role of workers from now on; unknown roles are left out.

        Return at once. Safe in threads.
        """
        if role in self._scaled:
            self._asked[role] = count

    def counts(self) -> dict[str, int]:
        """Return by role how many processes of actors, rewarders and the like are kept running."""
        wanted = [child.service.name for child in self.children if child.wanted]
        return {role: wanted.count(role) for role in self._scaled}

    def leave(self) -> None:
        """Make `run` end as after the learner's end: the processes first have time to leave.

        Return at once. Safe in threads.
        """
        self._left = True

    def run(self) -> int:
        """Run to the end; return the exit code of the process that failed the run, else the learner's.

        The end is a call of `stop` or `leave`, the learner's end with 0, or a failure that no restart
        can help. The code is 0 without a learner or before it has ended, and 137 for signal 9. All
        processes are killed when this returns or raises. Raise OSError if a process cannot be started.
        """
        try:
            while self._phase == "running" and not self._stops and not self._left:
                self._scale()
                self._tick()
            if self._left and self._phase == "running":
                self._phase = "leaving"
            self._stop_in_order()
        finally:
            for child in self.children:
                child.kill()
        return self._learner_code if self._failed_code is None else self._failed_code

    def _scale(self) -> None:
        """Add and end processes until each role has as many as were asked for.

        Processes that wait for a restart end first, then the newest. Each gets SIGTERM, an actor SIGKILL
        after `terminate_s`; then it is forgotten.
        """
        self.children = [one for one in self.children if one.wanted or one.running]
        self._kill_late()
        for role, count in list(self._asked.items()):
            wanted = [one for one in self.children if one.wanted and one.service.name == role]
            for child in reversed(sorted(wanted, key=lambda one: not one.running)[count:]):
                child.wanted = False
                child.terminate()
                if role == ACTOR:  # a rewarder's time to end depends on the judges that it asks
                    child.end_by = time.monotonic() + self._limits.terminate_s
                self._say(child, f"Told to end: {count} of the {role}s are asked for.", kind="run")
            for _ in range(count - len(wanted)):
                self._add(self._scaled[role])

    def _kill_late(self) -> None:
        """Kill the processes that are not wanted and had their time to end, and say so."""
        for child in self.children:
            if time.monotonic() >= child.end_by:
                child.end_by = math.inf
                child.kill()
                text = f"Killed, as it did not end in {self._limits.terminate_s:g} s."
                self._say(child, text, kind="run")

    def _add(self, service: Service) -> None:
        """Add a process of `service`, with the first number that is free, if it gets the GPUs it needs.

        If none are free, say so once, and try again at each call.
        """
        names = {child.name for child in self.children}
        number = next(i for i in itertools.count(1) if f"{service.name}.{i}" not in names)
        name, asked = f"{service.name}.{number}", self._asked[service.name]
        devices = self._devices.take(name)
        if devices is not None:
            given = variables_of(devices, self._environment)
            self.children.append(Child(service, number, self._report, given))
        elif self._short.get(service.name) != asked:
            self._short[service.name] = asked
            text = f"Not started: no GPU is free for it, and {asked} are asked for. Ask for fewer."
            self._report(Report(name, "run", text))

    def _tick(self) -> None:
        """Handle each process that ended as `_react` does, start those that are due, and sleep 0.05 s.

        Raise OSError if a start fails.
        """
        for child in self.children:
            code = child.reap()
            if code is not None:
                self._react(child, code)
        self._start_due()
        time.sleep(_POLL_S)

    def _react(self, child: Child, code: int) -> None:
        """Report that `child` ended with `code`; keep the learner's code; set what follows if `wanted`.

        0 of the learner ends the run. Unless `goes_on` 0 ends a process for good, the last one the run.
        A code that no restart helps (_final_codes) fails the run. Else plan a restart.
        """
        how, learner = describe_end(code), child.service.name == LEARNER
        if learner:
            self._learner_code = _exit_status(code)
        if not child.wanted:
            self._say(child, f"{how}.")
        elif code == 0 and (learner or not self.goes_on):
            child.wanted = False
            self._say(child, f"{how}.")
            if learner or not any(other.wanted for other in self._roles()):
                self._phase = "leaving"
        elif code in self._final_codes:
            self._fail(child, code, f"{how}. A restart cannot help: its output above says why")
        else:
            self._plan_restart(child, code, how)

    def _plan_restart(self, child: Child, code: int, how: str) -> None:
        """Set when a failed process starts again, and report that with `how`, a text on its end.

        The first wait is `first_backoff_s`; each failure in a row doubles it, up to `longest_backoff_s`.
        A process that ran for `settled_s` begins a new row. An essential `child` that failed more than
        `failures` times in a row fails the run, with `code` as the run's exit code, and is not started
        again. These limits are those of the supervisor.
        """
        settled = child.lived_s >= self._limits.settled_s
        child.failures = 1 if settled else child.failures + 1
        if child.service.essential and child.failures > self._limits.failures:
            self._fail(child, code, f"{how}. It failed {child.failures} times in a row")
            return
        doublings = min(child.failures - 1, 30)
        wait_s = min(self._limits.first_backoff_s * 2**doublings, self._limits.longest_backoff_s)
        child.due_at = time.monotonic() + wait_s
        unless = ", unless the run has ended" if code == 0 else ""  # a worker may see it end first
        self._say(child, f"{how} after {child.lived_s:.1f} s. It starts again in {wait_s:g} s{unless}.")

    def _fail(self, child: Child, code: int, text: str) -> None:
        """Report `text`, why the run cannot go on, and do not start `child` again.

        If the run is not ending yet, make it stop with the exit code `code`, -9 as 137. A process of
        `child` that runs is not stopped here.
        """
        child.wanted = False
        self._say(child, f"{text}. The run stops.")
        if self._phase == "running":
            self._failed_code = _exit_status(code)
            self._phase = "stopping"

    def _start_due(self) -> None:
        """Start all wanted processes that do not run and are due. Raise OSError if a start fails.

        Processes after the first service that is not ready wait, which is reported and fails the run
        after `ready_s`. If none has to wait, that time counts from 0 again.
        """
        now = time.monotonic()
        for position, child in enumerate(self.children):
            if child.wanted and not child.running and now >= child.due_at:
                self._start(child)
            later = self.children[position + 1 :]
            later_is_due = any(other.wanted and not other.running for other in later)
            if child.service.ready is not None and later_is_due and not child.service.ready():
                self._report_blocked(child)
                return
        self._blocked.restart()

    def _start(self, child: Child) -> None:
        """Start `child`; if the machine has no room for a process now, try again in 5 s.

        Raise OSError if the start fails for another reason.
        """
        try:
            child.start(self._environment)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            child.due_at = time.monotonic() + _NO_ROOM_S
            self._say(child, f"Not started: {error.strerror}. The next try is in {_NO_ROOM_S:g} s.")

    def _report_blocked(self, child: Child) -> None:
        """Report every 10 s that services wait for `child` to be ready; the first report comes at 10 s.

        After `ready_s` of waiting fail the run with exit code 69.
        """
        if self._blocked.expired():
            why = f"Not ready after {self._blocked.waited_s:.0f} s, and the other services wait for it"
            self._fail(child, ServerUnavailable.exit_code, why)
        elif self._blocked.report_due(_REPORT_EVERY_S):
            self._say(child, "Not ready yet. The other services wait for it.", kind="run")

    def _stop_in_order(self) -> None:
        """End learner and workers, then the queue server: SIGTERM, and SIGKILL after a limit.

        None waits for another, as a platform may leave less time than all need together. The limit is
        the learner's `save_s`, and `terminate_s` for others. After the learner has finished, the other
        roles first have `leave_s` to exit by themselves; a call of `stop` ends that wait. After a
        second one `at_once`, SIGKILL follows SIGTERM at once.
        """
        for child in self._roles():
            child.wanted = False
        if self._phase == "leaving":
            self._wait_for(self._roles(), self._limits.leave_s, lambda: self._stops > 0)
            self._wait_for(self.children, self._limits.linger_s, lambda: self._stops > 0)
        self._phase = "stopping"
        limit_s = max(self._limits.save_s, self._limits.terminate_s)
        for members in (self._roles(), self.children):
            for child in members:
                child.wanted = False
                child.terminate()
                if child.service.stage != LEARNER_STAGE:
                    child.end_by = min(child.end_by, time.monotonic() + self._limits.terminate_s)
            if not self._wait_for(members, limit_s, lambda: self._stops > 1):
                for child in members:
                    child.kill()
                self._wait_for(members, self._limits.terminate_s, lambda: False)

    def _wait_for(self, children: Sequence[Child], timeout_s: float, hurry: Callable[[], bool]) -> bool:
        """Return True when none of `children` runs, False after `timeout_s` or once `hurry()` is True.

        While waiting, ends of all processes are handled and due ones started, as in `_tick`.
        """
        deadline = Deadline(timeout_s)
        while any(child.running for child in children):
            if deadline.expired() or hurry():
                return False
            self._kill_late()
            self._tick()
        return True

    def _roles(self) -> list[Child]:
        """Return all processes but the queue server's, which the others need until they have ended."""
        return [child for child in self.children if child.service.stage != SERVER_STAGE]

    def _say(self, child: Child, text: str, kind: Literal["started", "ended", "run"] = "ended") -> None:
        """Call the `report` given to the supervisor with `child`'s name (as "actor.2"), kind, text.

        `kind` is "started", "ended" for the child's end and what follows from that, or "run" for a delay
        of other processes. `text` is a sentence for people.
        """
        self._report(Report(child.name, kind, text))


def _exit_status(code: int) -> int:
    """Return an exit code as a shell reports it: a code of 0 or more unchanged, -9 (signal 9) as 137."""
    return code if code >= 0 else 128 - code
