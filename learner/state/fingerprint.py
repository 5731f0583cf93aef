"""The machine and the number of processes, on which the last bits of the weights depend."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.common.log import get_logger
from penstock.learner.policy.processes import world_size

log = get_logger(__name__)


def this_machine() -> dict[str, Any]:
    """Return torch's version, threads, ranks, platform, CPU, instruction set and GPU, by name."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranks": world_size(),
        "platform": f"{platform.system()} {platform.machine()}",
        "CPU": _cpu_name(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def warn_of_another_machine(then: Mapping[str, Any]) -> None:
    """Log a warning with the differences between this machine and `then`, if there are any."""
    now = this_machine()
    other = [name for name in now if then.get(name) != now[name]]
    if other:
        differs = "; ".join(f"{name} was {then.get(name)} and is {now[name]}" for name in other)
        log.warning("This is another machine: the weights may differ in the last bits.", differs=differs)


def _cpu_name() -> str:
    """Return the CPU's name from /proc/cpuinfo, or what the platform names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
