"""Draw functions and error messages for a blind reading of the wording.

    python -m tests.wording SEED [--functions 40] [--errors 20]

prints, for a stranger, qualified name, signature and docstring of functions drawn at random from the
whole product, and error messages as the code raises them. The seed is the hash of the commit under test;
the draw is over the sorted qualified names. The stranger writes what each function does, returns and
raises, and for each error what to do next; someone else compares that with the code. By the rule of
CONTRIBUTING.md a docstring names the errors of the function's own body; others pass through unnamed.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.size import ROOT, product_files

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: Path) -> str:
    """The module's name below penstock, such as `learner.policy.packing`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def functions_of(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, signature and docstring of a file's functions; of `__init__` the docstring of its class."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}.{child.name}")
            elif isinstance(child, Function):
                owner = node if child.name == "__init__" and isinstance(node, ast.ClassDef) else child
                text = ast.get_docstring(owner) or ""
                yield f"{prefix}.{child.name}", signature(child), text
                yield from visit(child, f"{prefix}.{child.name}")

    return visit(ast.parse(path.read_text()), module_of(path))


def signature(function: Function) -> str:
    """Parameters and result as the source has them."""
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(function.args)}){result}"


class _Texts(ast.NodeTransformer):
    """Puts texts in place of the names they were given, as the user sees them."""

    def __init__(self, statements: Iterable[ast.AST]) -> None:
        self._texts: dict[str, ast.expr] = {}
        for node in statements:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.JoinedStr() as text):
                    self._texts[name] = text
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str()) as text):
                    self._texts[name] = text

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The text of this name, the name itself if it has none."""
        return self._texts.get(node.id, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        """The text with the values of its names as a part of it."""
        parts: list[ast.expr] = []
        for part in node.values:
            value = self.visit(part.value) if isinstance(part, ast.FormattedValue) else part
            if isinstance(value, ast.JoinedStr):
                parts += self.visit_JoinedStr(value).values
            else:
                parts.append(value if _is_text(value) else part)
        return ast.JoinedStr(parts)


def _is_text(node: ast.expr) -> bool:
    """Whether this is a constant text."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def errors_of(path: Path) -> Iterator[tuple[str, str]]:
    """Place and text of the errors that a file raises with a message, by `require` too."""
    module = ast.parse(path.read_text())
    found = {}
    for part in [module, *(node for node in ast.walk(module) if isinstance(node, Function))]:
        texts = _Texts([*module.body, *ast.walk(part)] if part is not module else module.body)
        for node in ast.walk(part):
            match node:  # a later, inner function takes the place of an outer one
                case ast.Raise(exc=ast.Call(func=error, args=[message, *_])):
                    found[node.lineno] = (ast.unparse(error), message, texts)
                case ast.Call(func=ast.Name(id="require"), args=[_, message, *_]):
                    found[node.lineno] = ("MalformedMessage", message, texts)
    for line, (error, message, texts) in found.items():
        if any(_is_text(part) and part.value.strip() for part in ast.walk(message)):
            text = ast.unparse(texts.visit(message))
            yield f"{module_of(path)}:{line}", f"{error}: {text}"


def main() -> int:
    """Print the draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", help="hash of the commit under test")
    parser.add_argument("--functions", type=int, default=40)
    parser.add_argument("--errors", type=int, default=20)
    options = parser.parse_args()
    files = [path for path in product_files() if path.suffix == ".py"]
    draw = random.Random(options.seed)
    functions = sorted(found for path in files for found in functions_of(path))
    errors = sorted(found for path in files for found in errors_of(path))
    for name, parameters, text in draw.sample(functions, options.functions):
        print(f"\n{name}{parameters}\n    {text.replace(chr(10), chr(10) + '    ')}")
    print("\nErrors\n")
    for place, message in draw.sample(errors, options.errors):
        print(f"{place}\n    {message}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
