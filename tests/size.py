"""The size of the product, held against its limits.

    python -m tests.size

prints a line per measure and exits with 1 if one is over its limit. Lines count Python and Lua in the
five folders; a function's length counts from its `def` to its last line.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("common", "learner", "actors", "rewarders", "deploy")

LINES = 46_500
MODULES_IN_A_FOLDER = 15
FUNCTION_P90 = 20
FUNCTION_LONGEST = 48


def product_files() -> list[Path]:
    """All Python and Lua files of the product."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".lua") and "__pycache__" not in path.parts
    ]


def function_lengths() -> dict[str, int]:
    """By `file:function`, its lines."""
    return {
        f"{path.relative_to(ROOT)}:{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for path in product_files()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def measures() -> dict[str, tuple[float, float, str]]:
    """By name: what was measured, its limit, and where."""
    files = product_files()
    modules: dict[Path, int] = {}
    for path in files:
        if path.suffix == ".py" and path.name != "__init__.py":
            modules[path.parent] = modules.get(path.parent, 0) + 1
    fullest = max(modules, key=lambda folder: modules[folder])
    functions = function_lengths()
    longest = max(functions, key=lambda name: functions[name])
    p90 = sorted(functions.values())[int(0.9 * len(functions))]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    return {
        "product lines": (lines, LINES, f"{len(files)} files"),
        "modules in a folder": (modules[fullest], MODULES_IN_A_FOLDER, str(fullest.relative_to(ROOT))),
        "function lines, p90": (p90, FUNCTION_P90, f"{len(functions)} functions"),
        "function lines, longest": (functions[longest], FUNCTION_LONGEST, longest),
    }


def main() -> int:
    """Print the measures; return 1 if one is over its limit."""
    found = measures()
    for name, (value, limit, where) in found.items():
        print(f"{name:<24}{value:>8}  (at most {limit}; {where})")
    return int(any(value > limit for value, limit, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
