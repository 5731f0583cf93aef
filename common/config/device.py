"""Defaults that depend on the device and the cores of the machine."""

import os
from pathlib import Path

_DEVICES = (Path("/dev/nvidia0"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Where the kernel shows a GPU of NVIDIA or AMD, or one of a Windows host."""


def has_gpu() -> bool:
    """Return whether torch can use a GPU. torch is imported only if the kernel shows one."""
    if not any(path.exists() for path in _DEVICES):
        return False
    import torch

    return torch.cuda.is_available()


def resolve_dtype(value: object) -> object:
    """Return "bfloat16" for "auto" on a machine with a GPU, "float32" without; else `value`."""
    if value != "auto":
        return value
    return "bfloat16" if has_gpu() else "float32"


def threads_per_process(processes: int) -> int:
    """Return how many threads each of `processes` may compute with on this machine's cores, at least 1.

    Example: 8 cores and 3 processes: 2. On Linux only the cores that this process may use count.
    """
    linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return max(1, cores // max(1, processes))
