"""Msgpack that msgpack itself would not write: duplicate keys, foreign types, broken pieces.

A tree is made of lists, `Pairs` (maps) and leaves. A path is a tuple of places: `Pairs` has the key of
its entry i at place 2i and the value at place 2i + 1. No edit changes a tree: each returns another.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import msgpack

Tree = Any
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes that stand in the message as they are."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Pairs:
    """A map as a flat list of keys and values; a key may occur twice and be of any type."""

    flat: list[Tree]


def to_tree(value: Any) -> Tree:
    """Return plain data as a tree."""
    if isinstance(value, dict):
        return Pairs([to_tree(part) for pair in value.items() for part in pair])
    return [to_tree(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_bytes(tree: Tree) -> bytes:
    """Return a tree as msgpack."""
    if isinstance(tree, Raw):
        return tree.data
    if isinstance(tree, list):
        return _header(0x90, 0xDC, len(tree)) + b"".join(map(to_bytes, tree))
    if isinstance(tree, Pairs):
        return _header(0x80, 0xDE, len(tree.flat) // 2) + b"".join(map(to_bytes, tree.flat))
    if isinstance(tree, int) and not isinstance(tree, bool):
        tree = max(-(2**63), min(tree, 2**64 - 1))  # msgpack has no other integers
    return msgpack.packb(tree, use_bin_type=True, unicode_errors="surrogatepass")


def to_json(tree: Tree) -> str:
    """Return a tree as JSON, or as a text that is nearly JSON."""
    if isinstance(tree, Raw):
        depth = len(tree.data) // 2
        nested = tree.data[:1] in (b"\x91", b"\x92", b"\x81")
        return "[" * depth + "]" * depth if nested else tree.data.decode("latin-1")
    if isinstance(tree, list):
        return f"[{', '.join(map(to_json, tree))}]"
    if isinstance(tree, Pairs):
        keys = [key if isinstance(key, str) else repr(key) for key in tree.flat[::2]]
        pairs = zip(keys, tree.flat[1::2], strict=False)
        return f"{{{', '.join(f'{json.dumps(key)}: {to_json(value)}' for key, value in pairs)}}}"
    return json.dumps(tree, default=repr)


def _header(short: int, long: int, size: int) -> bytes:
    if size < 16:
        return bytes([short | size])
    return struct.pack(">BH", long, size) if size < 1 << 16 else struct.pack(">BI", long + 1, size)


def children(tree: Tree) -> list[Tree]:
    """Return what lies directly below a tree; [] for a leaf."""
    if isinstance(tree, Pairs):
        return tree.flat
    return tree if isinstance(tree, list) else []


def with_children(tree: Tree, below: list[Tree]) -> Tree:
    """Return a list or map with other content."""
    return Pairs(below) if isinstance(tree, Pairs) else below


def at(tree: Tree, path: Path) -> Tree:
    """Return the node at a path."""
    for place in path:
        tree = children(tree)[place]
    return tree


def replaced(tree: Tree, path: Path, node: Tree) -> Tree:
    """Return the tree with another node at a path."""
    if not path:
        return node
    below = list(children(tree))
    below[path[0]] = replaced(below[path[0]], path[1:], node)
    return with_children(tree, below)


def paths(tree: Tree) -> list[Path]:
    """Return the path of every node, the root's first."""
    found: list[Path] = [()]
    for place, child in enumerate(children(tree)):
        found += [(place, *path) for path in paths(child)]
    return found
