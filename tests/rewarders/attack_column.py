"""The attacks of attacks.py, made on one pool by a process of certain rights.

    python -m tests.rewarders.attack_column FOLDER ATTACK...

FOLDER holds target.json. The last line of the output is JSON: by attack, the faults that it caused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.common.config.settings import RewarderSettings
from penstock.common.log import configure_logs
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.rewarders import attacks

TEXTS = ("a", "bcd")
TRUE = (1.0, 3.0)
TIMEOUT_S = 2.5
ATTACKS = {
    "a pickle on every descriptor": "pickles",
    "a forged answer on every descriptor": "frames",
    "a forged answer on the descriptors of other processes": "frames_to_others",
    "half an answer": "half_a_frame",
    "an answer of the right form with wrong contents, in 49 ways": "wrong_answers",
    "an answer of 2 GiB on every descriptor": "huge_frame",
    "3,000,000 values": "huge_answer",
    "all descriptors closed": "close_everything",
    "all sockets shut down": "shut_down_sockets",
    "descriptors sent to the rewarder": "pass_descriptors",
    "descriptors truncated, moved and made non-blocking": "flags_of_descriptors",
    "descriptors left open or inherited": "inherited_descriptors",
    "globals patched (`float`, `json`, `math`, Penstock's modules)": "patched_globals",
    "a thread left behind": "thread_left_behind",
    "a hanging `atexit`": "at_exit",
    "a daemon (subreaper, double setsid) that keeps the descriptors": "daemon",
    "a daemon that forks on and on": "running_daemon",
    "a program left behind": "stray_program",
    "files in /dev/shm": "shared_memory_files",
    "System V memory, semaphores and queues": "system_v",
    "30 MB of escapes on stdout and stderr": "flood",
    "ptrace of other processes": "trace",
    "memory of other processes": "memory_of_others",
    "SIGKILL to other processes": "kill_others",
    "SIGSTOP to other processes": "stop_others",
    "limits, priority and CPUs of other processes": "limit_others",
    "SIGKILL to its process group": "kill_own_group",
    "SIGSTOP to itself": "stop_itself",
    "an endless call that ignores signals": "hang",
    "the queue's URL": "read_queue_url",
    "/etc/shadow": "read_shadow",
    "a private folder of the rewarder's user": "read_private_folder",
    "the environment of other processes": "read_others_environment",
    "secrets in its own environment and memory": "read_own_environment",
    "keys in the keyring of the session": "read_keys",
    "setuid, capset and what rights are left": "regain_rights",
    "a suid program": "suid_program",
    "a fork bomb": "fork_bomb",
    "8 GiB of memory": "memory",
    "a file of 8 GiB": "large_file",
    "columns nested 100,000 and 400 deep": "deep_column",
    "1,000,000 columns": "many_columns",
    "columns of 100 MB": "huge_columns",
    "columns and metrics of wrong types and counts": "wrong_columns",
    "an exception whose text raises SystemExit": "mute_exception",
    "an exception of 60 MB": "huge_exception",
    "values with side effects": "side_effects",
    "a list that lies about itself": "lying_list",
    "an abstract socket for the next call": "abstract_socket",
    "a socket in a private folder": "queue_socket",
    "its own and Penstock's source": "change_code",
    "on import: a forged answer on every descriptor": "import:frames",
    "on import: all descriptors closed": "import:close_everything",
    "on import: globals patched": "import:patched_globals",
    "on import: a daemon": "import:daemon",
    "on import: SIGKILL to other processes": "import:kill_others",
    "with a thread on import: a forged answer": "thread:frames",
    "with a thread on import: half an answer": "thread:half_a_frame",
    "with a thread on import: all descriptors closed": "thread:close_everything",
    "with a thread on import: a daemon": "thread:daemon",
    "with a thread on import: SIGKILL to its process group": "thread:kill_own_group",
}
"""What docs/security.md calls each function of attacks.py, called on import or as a reward.

Code that starts a thread on import is the one kind of which a process serves several calls.
"""
MUST_ANSWER = frozenset({
    "frames_to_others", "inherited_descriptors", "trace", "memory_of_others", "read_queue_url",
    "read_shadow", "read_private_folder", "read_others_environment", "read_own_environment",
    "read_keys", "regain_rights", "suid_program", "queue_socket", "change_code", "running_daemon",
    "stray_program", "shared_memory_files", "system_v",
})  # fmt: skip
"""Attacks that count their successes, or that leave something: a failed call would show nothing."""
MAY_DECIDE = frozenset({
    "frames", "pickles", "patched_globals", "side_effects", "at_exit", "mute_exception", "daemon",
    "abstract_socket", "thread_left_behind",
})  # fmt: skip
"""Attacks that may forge their own score. A reward can do so by simply returning it."""
WITH_SIBLING = frozenset({
    "frames_to_others", "trace", "memory_of_others", "kill_others", "stop_others", "limit_others",
    "read_others_environment", "queue_socket", "kill_own_group", "close_everything",
})  # fmt: skip
"""Attacks beside which a call of another process is in progress."""


def spec_of(path: Path, name: str) -> RewardSpec:
    """The reward of this name in a file."""
    return RewardSpec(name, 1.0, str(path), hashlib.sha256(path.read_bytes()).hexdigest())


class Column:
    """One pool, what its rewards are to attack, and what is looked at after each attack."""

    def __init__(self, pool: ScoringPool, folder: Path, target: dict[str, Any]) -> None:
        self.pool, self.folder = pool, folder
        self.target = target | {
            "rewarder": os.getpid(),
            "owner": os.getuid(),
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
            "library": sys.modules[ScoringPool.__module__].__file__,
        }
        self.attacker = Path(target["hostile"])
        self.threads = ThreadPoolExecutor(1)
        self.reported: set[object] = set()
        self.running: set[int] = set()

    def score(self, spec: RewardSpec) -> tuple[float | None, ...]:
        """Score two completions by one reward."""
        arguments: dict[str, Any] = {
            "prompts": [""] * 2,
            "completions": list(TEXTS),
            "completion_ids": [[1], [1, 2, 3]],
            "target": [self.target] * 2,
        }
        return self.pool.score(spec, arguments).values

    def attack(self, name: str) -> list[str]:
        """Make one attack and return its faults."""
        self.target |= {"begun": f"{name}-begun", "ended": f"{name}-ended"}
        drop = Path(self.target["drop"])
        before = self.own_state()
        self.running = set(named({f"{self.target['mark']}d"}))
        faults: list[str] = []
        sibling: Future[Any] | None = None
        if name.rpartition(":")[2] in WITH_SIBLING:
            sibling = self.threads.submit(self.score, spec_of(self.attacker, "sibling"))
            until = time.monotonic() + TIMEOUT_S
            while not (drop / self.target["begun"]).exists() and time.monotonic() < until:
                time.sleep(0.005)
        (drop / "target.json").write_text(json.dumps(self.target))  # for attacks on import
        spec = self.spec_of_attack(name)
        answers = range(0, len(attacks.WRONG_ANSWERS), self.target["every"])
        variants = answers if name == "wrong_answers" else [0]
        for self.target["variant"] in variants:
            faults += self.faults_of_call(name, spec)
        (drop / self.target["ended"]).touch()
        if sibling is not None:
            with contextlib.suppress(ScoringFailed):
                if (values := sibling.result()) != TRUE:
                    faults.append(f"the call beside it got {values}")
        own = Path(spec.source) if name.startswith("thread:") else self.attacker
        faults += self.faults_of_next_calls(own)
        faults += self.left_behind(name.partition(":")[0])
        for what, found in self.own_state().items():
            slack = {"descriptors": 20, "MiB": 300}.get(what)
            if found != before[what] and (slack is None or found > before[what] + slack):
                faults.append(f"the rewarder's {what} went from {before[what]} to {found}")
        return faults

    def spec_of_attack(self, name: str) -> RewardSpec:
        """The reward that makes an attack."""
        kind, _, function = name.rpartition(":")
        if not kind:
            return spec_of(self.attacker, name)
        path = self.attacker.with_name(f"{kind}_{function}.py")
        return spec_of(path, "honest" if kind == "import" else function)

    def faults_of_call(self, name: str, spec: RewardSpec) -> Iterator[str]:
        """Yield what is wrong with the attacker's own result."""
        try:
            try:
                values = self.score(spec)
            except ScoringFailed as error:
                if name not in MUST_ANSWER or "took more than" not in str(error):
                    raise
                values = self.score(spec)  # this machine is busy
        except ScoringFailed as error:
            print(f"         {str(error)[:120]!r}", flush=True)
            if name in MUST_ANSWER:
                yield f"the attack failed by itself: {error}"
            if len(str(error)) > 1000 or not str(error).isprintable():
                yield f"an error of {len(str(error))} characters: {str(error)[:80]!r}"
            return
        except Exception as error:  # would end the rewarder
            yield f"the rewarder got {type(error).__name__}: {str(error)[:200]}"
            return
        if name == "wrong_answers":
            yield f"answer {self.target['variant']} gave {values}"
        elif values != TRUE and not (
            name.rpartition(":")[2] in MAY_DECIDE and values == (attacks.FORGED,) * 2
        ):
            yield f"its own values are {values}"

    def faults_of_next_calls(self, own: Path) -> Iterator[str]:
        """Yield what is wrong with the next calls: of the same code, of other code, of a built-in.

        A daemon or thread that code has started on import may write into the connection of its own
        process, so that further calls of that code fail, as if it raised.
        """
        others = (spec_of(Path(self.target["honest"]), "honest"), RewardSpec("xml_tags"))
        specs = (spec_of(own, "honest"), *others)
        for spec, true in zip(specs, (TRUE, TRUE, (0.0, 0.0)), strict=True):
            for attempt in range(2):
                try:
                    values = self.score(spec)
                except ScoringFailed as error:
                    if spec is specs[0] and own != self.attacker:
                        continue
                    if attempt:
                        yield f"the next call of {spec.name} from {spec.source[-20:]} failed: {error}"
                    elif "took more than" not in str(error):  # a stopped process is found so
                        yield f"one call of {spec.name} from {spec.source[-20:]} failed: {error}"
                    continue
                except Exception as error:
                    yield f"at the next call the rewarder got {type(error).__name__}: {str(error)[:200]}"
                    break
                if values != true:
                    yield f"the next call of {spec.name} got {values}"
                break

    def left_behind(self, kind: str) -> Iterator[str]:
        """Yield the processes and files that an attack left, and traps that were sprung.

        A process that has imported hostile code lives on for later calls. What code has started on
        import lives as long as that process, and what a call has started ends with the call. A
        daemon that an earlier attack started on import may still be there.
        """
        mark = self.target["mark"]
        names = {"import": set(), "thread": {f"{mark}d"}}.get(kind, {mark, f"{mark}d"})
        until = time.monotonic() + TIMEOUT_S
        while (found := set(named(names)) - self.running) and time.monotonic() < until:
            time.sleep(0.02)  # a killed process takes its time to end
        for pid in found:
            yield f"process {pid} of the attacker is left"
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        if Path(self.target["trap"]).exists():
            Path(self.target["trap"]).unlink()
            yield "something unpickled what a reward sent"
        for path in Path("/dev/shm").glob(f"{mark}*"):
            if path not in self.reported:
                self.reported.add(path)
                yield f"{path} of {path.stat().st_size} bytes is left"
        large = Path(self.target["drop"], "large")
        if large.exists() and large.stat().st_size > 1 << 30:
            yield f"a file of {large.stat().st_size} bytes"
        for ipc in ("shm", "sem", "msg"):
            table = Path("/proc/sysvipc", ipc)
            lines = table.read_text().splitlines() if table.exists() else []
            is_there = any(line.split()[0] == str(self.target["key"]) for line in lines)
            if is_there and ipc not in self.reported:
                self.reported.add(ipc)
                yield f"System V {ipc} is left"

    def own_state(self) -> dict[str, Any]:
        """What no attack may change in this process."""
        return {
            "limits": [resource.getrlimit(kind) for kind in range(resource.RLIMIT_OFILE + 1)],
            "CPUs": sorted(os.sched_getaffinity(0)),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "flags": [fcntl.fcntl(number, fcntl.F_GETFL) for number in (1, 2)],
            "descriptors": len(os.listdir("/proc/self/fd")),
            "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }


def named(names: set[str]) -> Iterator[int]:
    """Yield the living processes of these names."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            name, _, rest = text.partition("(")[2].rpartition(")")
            if name in names and rest.split()[0] not in "ZX":
                yield int(path.parent.name)


def main() -> None:
    """Make the attacks that the arguments name, and print what each one caused."""
    folder = Path(sys.argv[1])
    target = json.loads((folder / "target.json").read_text())
    settings = RewarderSettings(
        workers=2, timeout_s=TIMEOUT_S, memory_gib=1, user=target["user"], environment=[]
    )
    configure_logs("rewarder", "text")
    attacks.LIBC.syscall(attacks.KEYCTL, attacks.JOIN, b"penstock")
    key = (b"user", target["mark"].encode(), b"a secret", 8, attacks.SESSION)
    attacks.LIBC.syscall(attacks.ADD_KEY, *key)
    found: dict[str, Any] = {}
    with ScoringPool(settings) as pool, socket.socket(socket.AF_UNIX) as queue:
        queue.bind(target["socket"])
        queue.listen()
        column = Column(pool, folder, target)
        found["before"] = list(column.faults_of_next_calls(column.attacker))
        golds = pool.run("penstock.rewarders.rewards.golds:describe_golds", [r"\frac{1}{2}"], False)
        found["before"] += [] if isinstance(golds, list) else [f"golds cannot be read: {golds}"]
        for name in sys.argv[2:]:
            begin = time.monotonic()
            found[name] = column.attack(name)
            print(f"{time.monotonic() - begin:6.2f} s {name} {found[name]}", flush=True)
        column.threads.shutdown()
    marks = {target["mark"], f"{target['mark']}d"}
    found["after"] = [f"process {pid} is left" for pid in named(marks)]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
