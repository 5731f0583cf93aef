"""Defaults that depend on the device of the machine."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_FOLDER, _DEVICES = Path("/dev"), ("nvidia[0-9]*", "kfd", "dxg")
"""Folder and patterns of the files of a GPU: NVIDIA's, AMD's, and a Windows host's."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so")
"""Libraries of torch that a build for the CPU lacks."""


def has_gpu() -> bool:
    """Return whether torch can use a GPU, which is found out without importing torch.

    The kernel shows a GPU, CUDA_VISIBLE_DEVICES and the like do not hide all, and the installed torch is
    a build for CUDA or ROCm.
    """
    hidden = any(os.environ.get(name) in ("", "-1") for name in _HIDING)
    shown = any(path for pattern in _DEVICES for path in _FOLDER.glob(pattern))
    spec = find_spec("torch")
    if hidden or not shown or spec is None or not spec.origin:
        return False
    return any((Path(spec.origin).parent / "lib" / library).exists() for library in _LIBRARIES)


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs that a process with these variables sees; () if torch can use none.

    CUDA_VISIBLE_DEVICES, or HIP_VISIBLE_DEVICES, has the names. Without it they are numbers from 0, as
    many as ROCR_VISIBLE_DEVICES names, or as the kernel shows of NVIDIA's GPUs, and "0" alone for other
    makers' GPUs.
    """
    listed = next((environment[name] for name in _HIDING[:2] if name in environment), None)
    if not has_gpu() or listed in ("", "-1"):
        return ()
    if listed is not None:
        return tuple(filter(None, map(str.strip, listed.split(","))))
    if shown := environment.get(_HIDING[2]):  # it hides the others from HIP, which counts from 0
        return tuple(map(str, range(len(shown.split(",")))))
    count = len(list(_FOLDER.glob(_DEVICES[0])))
    return tuple(map(str, range(count or 1)))


def resolve_dtype(value: object) -> object:
    """Return "bfloat16" for "auto" on a machine with a GPU, "float32" without; else `value`."""
    if value != "auto":
        return value
    return "bfloat16" if has_gpu() else "float32"


def resolve_logprob_chunk(value: object) -> object:
    """Return 1024 for "auto" on a machine with a GPU, 128 without; else `value`."""
    if value != "auto":
        return value
    return 1024 if has_gpu() else 128
