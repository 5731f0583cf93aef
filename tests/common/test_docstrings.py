"""A docstring names each error that its function's own body raises."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.size import ROOT, product_files
from tests.wording import Function

_EXAMPLE = '''
def load(path):
    """Return the rows. Raise DataError for a damaged file."""
    try:
        raise ValueError("caught below")
    except ValueError as error:
        raise DataError("damaged") from error
    finally:
        raise RunTaken("taken")

    def inner():
        raise KeyError("of another function")
'''


def raised_in(node: ast.AST) -> Iterator[str]:
    """The classes of errors that the body raises; those in a `try` with handlers may be caught."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Try) and child.handlers:
            for part in [*child.handlers, *child.orelse, *child.finalbody]:
                yield from raised_in(ast.Module([part], []))
            continue
        if isinstance(child, ast.With) and "reading(" in ast.unparse(child.items[0].context_expr):
            continue  # a context that translates what is raised inside
        if isinstance(child, ast.Raise) and child.exc is not None:
            error = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(error).split(".")[-1]
            if name[0].isupper() and name != "NotImplementedError":
                yield name
        yield from raised_in(child)


def unnamed(source: str, texts: dict[str, str]) -> list[str]:
    """`function: error` for errors that a function raises and `texts`, its docstrings, do not name."""
    return [
        f"{node.name}: {error}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Function)
        for error in sorted(set(raised_in(node)))
        if error not in texts.get(f"{node.name}:{node.lineno}", "")
    ]


def test_the_search_finds_an_error_that_is_not_named():
    assert unnamed(_EXAMPLE, {"load:2": "Raise DataError."}) == ["load: RunTaken", "inner: KeyError"]


def test_each_docstring_names_what_its_function_raises():
    found = {}
    for path in product_files():
        if path.suffix == ".py" and (missing := unnamed(path.read_text(), docstrings(path.read_text()))):
            found[str(path.relative_to(ROOT))] = missing
    assert found == {}


def docstrings(source: str) -> dict[str, str]:
    """By `function:line`, the docstring; of `__init__` that of its class as well."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                owners = [child]
                if child.name == "__init__" and isinstance(node, ast.ClassDef):
                    owners.append(node)
                text = "\n".join(ast.get_docstring(owner) or "" for owner in owners)
                found[f"{child.name}:{child.lineno}"] = text
    return found
