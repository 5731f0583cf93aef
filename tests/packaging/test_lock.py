"""constraints.txt, made on one Python, must name the packages that every supported Python needs."""

from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "triton", "openai-harmony"}
"""The Makefile installs torch by itself, and says why the others are missing."""

EXTRAS = {"all", "dev"}


def locked() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines}


def needed(python: str) -> set[str]:
    """The packages that `penstock[all,dev]` needs on a version of Python, by the installed metadata."""
    installed = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}
    short = ".".join(python.split(".")[:2])
    environment = {**default_environment(), "python_version": short, "python_full_version": python}
    found: dict[str, set[str]] = {}
    waiting = [("penstock", EXTRAS)]
    while waiting:
        name, extras = waiting.pop()
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | extras
        for text in (installed[name].requires or []) if name in installed else []:
            asked = Requirement(text)
            chosen = [{**environment, "extra": extra} for extra in found[name] | {""}]
            if asked.marker is None or any(asked.marker.evaluate(one) for one in chosen):
                waiting.append((canonicalize_name(asked.name), set(asked.extras)))
    return set(found) - {"penstock"}


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.12.0", "3.13.0"])
def test_the_lock_serves_every_supported_python(python):
    assert needed(python) - LEFT_OUT <= locked()
    assert len(needed(python)) > 100
    for one in distributions():
        versions = SpecifierSet(one.metadata["Requires-Python"] or "")
        if canonicalize_name(one.metadata["Name"]) in locked():
            assert python in versions, f"{one.metadata['Name']} needs Python {versions}"
