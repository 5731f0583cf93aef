"""The mutated messages: each follows from the seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz.edits import EDITS, Message
from tests.fuzz.hostile import anything, field_value, nearby
from tests.fuzz.packing import Pairs, Raw, Tree, at, children, paths, replaced, to_bytes, with_children
from tests.fuzz.valid import Sample

_SHARES = {
    "intake": 14, "evaluation": 8, "rewarder": 5, "actor": 4, "partial": 4, "weights": 3, "contract": 4,
}  # fmt: skip


def mutated(rng: random.Random, samples: Sequence[Sample]) -> tuple[Sample, bytes]:
    """Return a valid message and what became of its bytes."""
    sample = rng.choices(samples, [_SHARES[one.consumer] for one in samples])[0]
    times = rng.choices((1, 2, 3), (80, 15, 5))[0]
    level = rng.choices(("bytes", "structure", "fields"), (25, 30, 45))[0]
    if level == "bytes":
        data = sample.data
        for _ in range(times):
            data = other_bytes(rng, data, rng.choice(samples).data)
        return sample, data
    message = Message(sample.tree)
    for _ in range(times):
        if level == "structure":
            message.tree = other_structure(rng, message.tree, rng.choice(samples).tree)
        elif not _edit_field(rng, message):
            break
    return sample, to_bytes(message.tree)


def _edit_field(rng: random.Random, message: Message) -> bool:
    """Change a field, or several that belong together. Return whether the message has its form still."""
    try:
        if rng.random() < 0.5:
            rng.choice(EDITS[message.kind.__name__])(rng, message)
        else:
            name = rng.choice([*message.names])
            message.put(name, field_value(rng, name.rpartition(".")[2], message.get(name)))
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
    ):  # an earlier edit broke its form
        return False
    return True


def other_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return bytes with some of them flipped, set, cut off, left out, doubled or from elsewhere."""
    if not data:
        return other
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 64, 1_000)))
    how = rng.randrange(8)
    if how == 0:
        return data[:start] + bytes([data[start] ^ (1 << rng.randrange(8))]) + data[start + 1 :]
    if how == 1:
        return data[:start] + rng.randbytes(end - start) + data[end:]
    if how == 2:
        return data[:start]
    if how == 3:
        return data[:start] + data[end:]
    if how == 4:
        return data[:end] + data[start:]
    if how == 5:
        return data[:start] + bytes([rng.randrange(0xC0, 0x100)]) + data[start + 1 :]
    if how == 6:
        place = rng.randrange(len(other))
        return data[:start] + other[place : place + end - start] + data[end:]
    return data[:start] + rng.choice((b"\x00", b"\xff", b"\x91", b"\xc1")) * (end - start) + data[start:]


def other_structure(rng: random.Random, tree: Tree, other: Tree) -> Tree:
    """Return a tree with a node replaced, left out, doubled, wrapped, swapped or from elsewhere."""
    path = rng.choice(paths(tree))
    node = at(tree, path)
    how = rng.randrange(9)
    if how < 4:
        return replaced(tree, path, nearby(rng, node) if how == 0 else anything(rng))
    if how == 4 and isinstance(node, (str, bytes)):
        new = node.encode("utf-8", "replace") if isinstance(node, str) else node.decode("latin-1")
        return replaced(tree, path, new)
    if how == 5 and children(node):
        below, place = list(children(node)), rng.randrange(len(children(node)))
        width = 2 if isinstance(node, Pairs) else 1
        place -= place % width
        piece = below[place : place + width]
        below = below[:place] + below[place + width :] if rng.random() < 0.5 else below + piece
        return replaced(tree, path, with_children(node, below))
    if how == 6:
        return replaced(tree, path, rng.choice(([node], [node, node], Pairs(["a", node]), Raw(b""))))
    if how == 7:
        second = rng.choice(paths(tree))
        if path[: len(second)] != second and second[: len(path)] != path:
            return replaced(replaced(tree, path, at(tree, second)), second, node)
    return replaced(tree, path, at(other, rng.choice(paths(other))))
