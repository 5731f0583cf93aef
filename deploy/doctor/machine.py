"""What the machine has: processors, memory, GPUs. Neither torch nor a driver's library is imported."""

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_TIMEOUT_S = 30
_QUERY = ("--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it; memory in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine. `memory` has the bytes that are free for a run. `cuda` is the driver's (12, 8).

    `gpus` are those of the driver, `smi_error` what nvidia-smi said if it failed, else "".
    """

    cores: int
    memory: int
    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] | None = None
    smi_error: str = ""

    def seen_with(self, devices: str | None) -> "Machine":
        """Return the machine with the GPUs whose numbers CUDA_VISIBLE_DEVICES lists, in that order.

        These are none with "", and all with None, for no such variable, and with names as GPU-8f2a.
        """
        if devices is None or re.search("[A-Z]", devices):
            return self
        numbers = [int(one) for one in devices.split(",") if one.strip().isdecimal()]
        return replace(self, gpus=tuple(self.gpus[one] for one in numbers if one < len(self.gpus)))


def read_machine() -> Machine:
    """Return what this machine has. A machine without nvidia-smi has no GPU here."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        gpus = tuple(map(_gpu, _nvidia_smi(*_QUERY).splitlines()))
        header = re.search(r"CUDA (?:UMD )?Version: (\d+)\.(\d+)", _nvidia_smi())
        cuda = (int(header[1]), int(header[2])) if header else None
        return Machine(cores, _free_memory(), gpus, cuda)
    except FileNotFoundError:
        return Machine(cores, _free_memory())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", "") or str(error)
        return Machine(cores, _free_memory(), smi_error=said.strip())


def _nvidia_smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints with these arguments.

    Raise FileNotFoundError if there is no such program, subprocess.SubprocessError if it fails, with its
    output as `stdout`, or takes 30 s.
    """
    program = ["nvidia-smi", *arguments]
    return subprocess.run(
        program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S,
        check=True,
    ).stdout  # fmt: skip


def _gpu(line: str) -> Gpu:
    """Return the GPU of a line `NAME, TOTAL, FREE`, memory in MiB. Raise ValueError for another form."""
    name, total, free = line.rsplit(", ", 2)
    return Gpu(name, int(total) * MIB, int(free) * MIB)


def _free_memory() -> int:
    """Return the bytes of memory that processes can still take, within a container's limit if any."""
    free: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return min(free, limit - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no limit: the file is missing, or says `max`
        return free
