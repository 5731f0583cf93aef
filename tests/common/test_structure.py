"""Each sub-package imports only those before it in an order, and no modules form a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.size import ROOT, measures, product_files
from tests.wording import module_of

ORDER = {
    "common": (
        "wire",
        "files",
        "config",
        "chat",
        "journal",
        "broker",
        "monitor",
        "transfer",
        "sandbox",
        "episodes",
    ),
    "learner": ("algorithm", "policy", "state", "data", "streams", "report"),
}
"""The sub-packages, lowest first. Those of the learner import none of the modules above them."""


def imported_by(path: Path) -> set[str]:
    """The modules of the product that a file imports, such as `learner.policy.packing`."""
    known = {module_of(file) for file in product_files() if file.suffix == ".py"}
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock."):
            module = node.module.removeprefix("penstock.")
            parts = {f"{module}.{name.name}" for name in node.names} & known
            found |= parts or {module}
        elif isinstance(node, ast.Import):
            names = (name.name.removeprefix("penstock.") for name in node.names)
            found |= {name for name in names if name in known}
    return found


IMPORTS = {module_of(path): imported_by(path) for path in product_files() if path.suffix == ".py"}


@pytest.mark.parametrize("package", ORDER)
def test_a_sub_package_imports_only_those_before_it(package: str) -> None:
    order = ORDER[package]
    folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
    assert folders <= set(order), "a new sub-package has a place in ORDER"
    for module, imports in IMPORTS.items():
        if module.startswith(f"{package}.") and module.split(".")[1] in order:
            own = order.index(module.split(".")[1])
            for name in imports:
                if name.startswith(f"{package}.") and name.split(".")[1] in order:
                    assert order.index(name.split(".")[1]) <= own, f"{module} imports {name}"
                elif package == "learner":
                    assert not name.startswith("learner."), f"{module} imports {name}"


def test_the_packages_and_modules_directly_below_a_folder_form_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, imports in IMPORTS.items():
        unit = ".".join(module.split(".")[:2])
        graph.setdefault(unit, set()).update(".".join(name.split(".")[:2]) for name in imports)
    check_for_circles({unit: found - {unit} for unit, found in graph.items()})


def test_no_modules_form_a_circle() -> None:
    check_for_circles(IMPORTS)


def check_for_circles(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_the_product_keeps_its_limits_of_size() -> None:
    for name, (value, limit, where) in measures().items():
        assert value <= limit, f"{name}: {value} in {where}, at most {limit}"
