"""Which process of `penstock up` uses which GPUs.

A process has, by the first line that fits:

    the Procfile's command sets CUDA_VISIBLE_DEVICES    these
    --devices names the process or its role             these
    one GPU, or LEARNER_SHARE_DEVICE                    the first, as all others
    an actor                                            the next free ones, as many as its engine uses
    the learner, with LEARNER_EVALUATE_ONLY             the first, beside an actor
    the learner                                         all that the actors leave, the first ones
    another process, such as a rewarder                 none of its own: it sees all

Example: 8 GPUs and 2 actors whose engines use one GPU each. The learner has 0 to 5, actor.1 has 6, and
actor.2 has 7.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.common.config.command import build
from penstock.common.config.device import visible_gpus
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.variables import read_environment
from penstock.common.errors import ConfigError
from penstock.common.text import counted

LEARNER, ACTOR = "learner", "actor"
VISIBLE, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"

_OWN = re.compile(rf"(?<!\S){VISIBLE}=(\S*)")
_RANGE = re.compile(r"(\d+)-(\d+)")
_SHARING, _IDLE = "LEARNER_SHARE_DEVICE", "LEARNER_EVALUATE_ONLY"
_YES = ("true", "1", "yes", "on", "t", "y")  # as pydantic reads a truth value
_FORM = "write --devices learner=0-5,actor.1=6,actor.2=7; several devices are 0-2 or 0+2"

Devices = tuple[str, ...]
"""Names as in CUDA_VISIBLE_DEVICES: numbers, or texts such as GPU-8f2a."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs a run may use: their names, and how many an actor's engine uses.

    `shared`: all use the first. `idle`: the learner trains nothing, and its GPU is an actor's too.
    """

    names: Devices
    actor_size: int = 1
    shared: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A process that is to be started. Without `devices` it sees all that `penstock up` sees."""

    name: str
    command: str
    devices: Devices = ()


class DevicePlan:
    """Which of `gpus` each process has, as shared out when this is made; later actors take free ones.

    `commands` are a Procfile's, by name. `counts[name]` processes of each are planned, 1 if not named.
    `asked` is the value of --devices. Raise ConfigError for too few devices, and if `asked` names a
    process or device that does not exist, or a device twice.
    """

    def __init__(
        self, commands: Mapping[str, str], counts: Mapping[str, int], gpus: Gpus, asked: str = ""
    ) -> None:
        self.commands, self.counts = dict(commands), dict(counts)
        """By role the commands, as they are to be started, and how many processes of each there are."""
        self._gpus = gpus
        names = [f"{role}.{i + 1}" for role in commands for i in range(counts.get(role, 1))]
        self._by_role = _of_procfile(commands)
        self._by_name = _read(asked, [*commands, *names], [*gpus.names], self._by_role)
        _check_sizes(self._by_name, gpus)
        roles = commands.keys() - {ACTOR}
        self._by_role |= {one: got for one, got in self._by_name.items() if one in roles}
        if gpus.names and not asked and (gpus.shared or len(gpus.names) == 1):
            self._share_one()
        self._pool = self._deal([name for name in names if self._is_open(name)])
        self._use_torchrun()
        self.processes = [
            Planned(one, self.commands[role_of(one)], self.take(one) or ()) for one in names
        ]
        """The processes, in order."""

    def _share_one(self) -> None:
        """Give all the first device, and an actor as many of the first as its engine uses."""
        if len(self._gpus.names) < self._gpus.actor_size and self.counts.get(ACTOR, 1):
            raise _too_few(self._gpus, self._gpus.actor_size, "an actor")
        sizes = {LEARNER: 1, ACTOR: self._gpus.actor_size}
        shared = {role: self._gpus.names[: sizes[role]] for role in sizes if role in self.commands}
        self._by_role = shared | self._by_role

    def _is_open(self, name: str) -> bool:
        """Return whether the process `name` is an actor or the learner and has no devices yet."""
        role = role_of(name)
        return role in (LEARNER, ACTOR) and name not in self._by_name and role not in self._by_role

    def _deal(self, names: Sequence[str]) -> list[str]:
        """Share what nobody has out to the learner, if it is in `names`; return what is for actors.

        Raise ConfigError if that is not enough for all of `names`.
        """
        used = {one for got in (*self._by_name.values(), *self._by_role.values()) for one in got}
        free = [one for one in self._gpus.names if one not in used]
        actors = sum(role_of(name) == ACTOR for name in names)
        has_learner = len(names) > actors and not self._gpus.idle
        needed = actors * self._gpus.actor_size
        pool = list(self._by_name.get(ACTOR, free[len(free) - needed if has_learner else 0 :]))
        rest = [one for one in free if one not in pool]
        if self._gpus.names and (len(pool) < needed or (has_learner and not rest)):
            who = f"{counted(actors, 'actor')}{' and the learner' if has_learner else ''}"
            raise _too_few(self._gpus, needed + has_learner, who)
        if has_learner:
            self._by_role[LEARNER] = tuple(rest)
        elif len(names) > actors:
            self._by_role[LEARNER] = self._gpus.names[:1]
        return pool

    def _use_torchrun(self) -> None:
        """Let torchrun start a learner that has several devices, if its command is `learner` alone."""
        devices = self._by_name.get(f"{LEARNER}.1", self._by_role.get(LEARNER, ()))
        if len(devices) > 1 and self.commands[LEARNER].split() == [LEARNER]:
            many = f"--standalone --nproc-per-node {len(devices)}"
            self.commands[LEARNER] = f"python -m penstock.learner.torchrun {many}"

    def take(self, name: str) -> Devices | None:
        """Return the devices of the process `name`, which keeps them also for a later start.

        Return None if not enough are free for an actor. Return () for a process that needs none.
        """
        if name in self._by_name or not self._is_open(name) or not self._gpus.names:
            return self._by_name.get(name, self._by_role.get(role_of(name), ()))
        size = self._gpus.actor_size
        if len(self._pool) < size:
            return None
        taken, self._pool = self._pool[:size], self._pool[size:]
        self._by_name[name] = tuple(taken)
        return tuple(taken)

    def describe(self, threads: int) -> str:
        """Return a line for each process: name, GPUs, threads and command. `threads` 0: no limit."""
        lines = [f"{'process':<12}{'GPUs':<18} {'threads':<8}command"]
        for one in self.processes:
            gpus = ",".join(one.devices) or ("all" if self._gpus.names else "none")
            limit = threads if role_of(one.name) in (LEARNER, ACTOR) else 0
            lines.append(f"{one.name:<12}{gpus:<18} {limit or 'all':<8}{one.command}")
        return "\n".join(lines)


def find_gpus(env_file: Path | None, roles: Collection[str]) -> Gpus:
    """Return the GPUs of this machine for a run with these variables and roles.

    Raise ConfigError if `env_file` cannot be read or, with an actor, a setting of actors is wrong.
    """
    environment = read_environment(env_file)
    size = 1
    if ACTOR in roles:
        actor = build(ActorCommand, {"env_file": env_file}).actor
        size = actor.tensor_parallel_size * actor.pipeline_parallel_size
    shared, idle = (
        LEARNER in roles and environment.get(name, "").lower() in _YES for name in (_SHARING, _IDLE)
    )
    return Gpus(visible_gpus(environment), size, shared, idle)


def threads_of_each(environment: Mapping[str, str], processes: int, gpus: Devices) -> int:
    """Return how many threads each of the learner and the actors computes with, 0 for as many as cores.

    Without a GPU these `processes` share the cores: were each to use all, each would wait for the
    others' threads. OMP_NUM_THREADS in the `environment` is left as it is.
    """
    if "OMP_NUM_THREADS" in environment or gpus:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // max(1, processes))


def role_of(name: str) -> str:
    """Return the role in a process's name: "actor" of "actor.2"."""
    return name.rpartition(".")[0]


def variables_of(devices: Devices, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a process sees these devices alone; {} for none of its own.

    Of two AMD's HIP reads its own alone, so that is set too where the `environment` has it.
    """
    names = [VISIBLE, *([_HIP] if _HIP in environment else [])]
    return dict.fromkeys(names, ",".join(devices)) if devices else {}


def _of_procfile(commands: Mapping[str, str]) -> dict[str, Devices]:
    """Return by role the devices that its command sets itself."""
    found = {role: _OWN.search(command) for role, command in commands.items()}
    return {role: tuple(own[1].strip("\"'").split(",")) for role, own in found.items() if own}


def _too_few(gpus: Gpus, needed: int, who: str) -> ConfigError:
    """Return the error for too few devices."""
    return ConfigError(
        f"found {counted(len(gpus.names), 'GPU')} ({', '.join(gpus.names)}), expected at least {needed} "
        f"for {who} with {counted(gpus.actor_size, 'GPU')} per actor (ACTOR_TENSOR_PARALLEL_SIZE x "
        "ACTOR_PIPELINE_PARALLEL_SIZE): lower --actors or these sizes, name fewer devices in --devices, "
        f"or set {VISIBLE} to one GPU that all share"
    )


def _read(
    asked: str, names: Sequence[str], gpus: Sequence[str], own: Mapping[str, Devices]
) -> dict[str, Devices]:
    """Return the devices of each process or role that the value of --devices names.

    `names` are the processes and roles that exist, `own` the roles whose commands set their devices.
    Raise ConfigError for another form or name, and for a device that is missing or there twice.
    """
    found: dict[str, Devices] = {}
    owner = {one: f"{role} in the Procfile" for role, devices in own.items() for one in devices}
    for part in filter(None, asked.split(",")):
        name, equals, devices = part.strip().partition("=")
        if not equals or name in found or name not in names:
            known = ", ".join(names)
            raise ConfigError(f"--devices {part}: expected one of {known}, once; {_FORM}")
        if name in own or role_of(name) in own:
            raise ConfigError(
                f"--devices {part}: the Procfile's command sets {VISIBLE} too; leave one out"
            )
        found[name] = tuple(_devices(devices))
        for one in found[name]:
            if one not in gpus:
                there = ", ".join(gpus) or "none"
                raise ConfigError(f"--devices {part}: found no GPU {one}, expected of: {there}; {_FORM}")
            if one in owner:
                raise ConfigError(
                    f"--devices {part}: GPU {one} is given to {owner[one]} too, expected each once. To "
                    f"let all share one GPU, set {VISIBLE}={one} and leave --devices out"
                )
            owner[one] = name
    return found


def _devices(text: str) -> Iterator[str]:
    """Yield the devices that a text names: 0, 1, 2 and 5 for "0-2+5"."""
    for part in text.split("+"):
        if (span := _RANGE.fullmatch(part)) and int(span[1]) <= int(span[2]):
            yield from map(str, range(int(span[1]), int(span[2]) + 1))
        else:
            yield part


def _check_sizes(given: Mapping[str, Devices], gpus: Gpus) -> None:
    """Raise ConfigError if an actor that is named has another number of devices than its engine uses."""
    for name, devices in given.items():
        if role_of(name) == ACTOR and len(devices) != gpus.actor_size:
            raise ConfigError(
                f"--devices {name}: found {counted(len(devices), 'GPU')}, expected {gpus.actor_size} "
                f"(ACTOR_TENSOR_PARALLEL_SIZE x ACTOR_PIPELINE_PARALLEL_SIZE); {_FORM}"
            )
    if gpus.shared and given:
        raise ConfigError(f"--devices: with {_SHARING} all share one GPU; leave one out")
