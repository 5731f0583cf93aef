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
    """Return by name what the last bits of the weights depend on.

    This is torch's version, its number of threads, the number of learner processes (ranks), the
    platform, the CPU's name and its instruction set as torch uses it, and the GPU's name or "cpu".
    """
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
    """Log a warning with the values in which `this_machine` now differs from `then`, if there are any.

    `then` is an earlier result of `this_machine`, stored with weights or a journal.
    """
    now = this_machine()
    other = [name for name in now if then.get(name) != now[name]]
    if other:
        differs = "; ".join(f"{name} was {then.get(name)} and is {now[name]}" for name in other)
        log.warning("This is another machine: the weights may differ in the last bits.", differs=differs)


def _cpu_name() -> str:
    """Return the CPU's name from /proc/cpuinfo; without one there, Python's, which may be ""."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
