"""What the last bits of the weights depend on beside the data: the machine, and how many work on it."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.common.log import get_logger
from penstock.learner.policy.processes import world_size

log = get_logger(__name__)

_CPUINFO = Path("/proc/cpuinfo")


def this_machine() -> dict[str, Any]:
    """Torch, threads, ranks, platform, CPU, the instructions torch uses of it, the GPU if any."""
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
    """Say in one line what differs between this machine and that of a record."""
    now = this_machine()
    found = [
        f"{name} was {then.get(name)} and is {now[name]}" for name in now if then.get(name) != now[name]
    ]
    if found:
        log.warning("another machine: the weights may differ in the last bits", differs="; ".join(found))


def _cpu_name() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
