"""Values that no role sends: for a node of any message, and for a field by its name."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import numpy as np

from tests.fuzz.packing import Pairs, Raw, Tree

INTEGERS = (
    -(2**63), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 65_536, 65_537, 2**31 - 1, 2**31,
    2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
FLOATS = (
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1e100, 1e10, 1e9, -1e9, 3.5e38, 5e-324, -0.0, 0.0, 0.5,
    1.0, 1.5, 100.0, 100.5,
)  # fmt: skip
TEXTS = (
    "", " ", "x" * 201, "x" * 70_000, "a\x00b", "\x1b[2J\x1b]0;x\x07", "\u2028", "\U0001f600", "step",
    "prompt", "answer", "stop", "length", "dead", "eval", "train:7", "train:007", "train:-1",
    "eval:1.3:0", "eval:9.9:99", "train:" + "9" * 25, "train:" + "9" * 5000, f"eval:1.{'9' * 5000}:0",
    "../../etc/passwd", "/dev/zero", "/" + "x" * 300, "1" * 5000, "NaN", "\udc80",
)  # fmt: skip
DEPTHS = (2, 8, 31, 32, 33, 34, 60, 500, 512, 1_000, 1_024, 5_000, 100_000)


def anything(rng: random.Random) -> Tree:
    """Return a hostile value for any place."""
    return rng.choice(_KINDS)(rng)


def _nested(rng: random.Random) -> Raw:
    """Lists or maps in one another."""
    depth = rng.choice(DEPTHS)
    return Raw(rng.choice((b"\x91", b"\x81\xa1a", b"\x92\xc0")) * depth + b"\xc0")


def _broken(rng: random.Random) -> Raw:
    """A type that nobody sends, a size that is not there, a text that is not UTF-8."""
    timestamp = b"\xc7\x0c\xff" + struct.pack(">Iq", rng.choice((0, 2**32 - 1)), rng.choice((0, 2**62)))
    pieces = (
        b"\xc1", b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x01", b"\xd7\xff" + b"\xff" * 8, timestamp,
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\x40\x00", b"\xa3\xed\xa0\x80",
        b"\xa2\xff\xfe", b"", b"\xdd\x00\x10\x00\x00" + b"\xc0" * 5,
    )  # fmt: skip
    return Raw(rng.choice(pieces))


def _map(rng: random.Random) -> Pairs:
    """A map with keys that are no text, twice the same, or cannot be hashed."""
    keys: tuple[Tree, ...] = (
        1, None, True, b"a", 1.5, math.nan, [], [1], Pairs([]), "a", "a", 2**63, Raw(b"\xd4\x05\x00"),
        Raw(b"\xa1\xff"), "x" * 300,
    )  # fmt: skip
    return Pairs(
        [part for _ in range(rng.randrange(4)) for part in (rng.choice(keys), rng.choice((1, None)))]
    )


def _list(rng: random.Random) -> Tree:
    return rng.choice(([], [None], [[]], [1, "a", None], ["x"] * 1_025, [1.0, "1"], [0] * 5_000))


_KINDS: tuple[Callable[[random.Random], Tree], ...] = (
    lambda rng: rng.choice(INTEGERS),
    lambda rng: rng.choice(INTEGERS),
    lambda rng: rng.choice(FLOATS),
    lambda rng: rng.choice(TEXTS),
    lambda rng: rng.choice((None, True, False)),
    lambda rng: rng.choice((b"", b"\x00", b"\x00" * 4, b"\xff" * 8, b"\x01" * 12, b"abc")),
    _nested,
    _broken,
    _map,
    _list,
)


def other_floats(rng: random.Random, old: bytes) -> bytes:
    """Return float32 numbers with one or all of them changed."""
    values = np.frombuffer(old, "<f4").copy()
    new = rng.choice((0.0, -0.0, 0.25, -1e-40, -200.0, -1e4, -1e5, -3e38, math.nan, math.inf, -math.inf))
    values[slice(None) if rng.random() < 0.3 else rng.randrange(max(1, len(values)))] = new
    return values.tobytes()


def other_tokens(rng: random.Random, old: bytes) -> bytes:
    """Return int32 numbers with one of them changed, added or left out."""
    values = np.frombuffer(old, "<i4").copy()
    place = rng.randrange(max(1, len(values)))
    if rng.random() < 0.3:
        return (np.append(values, values) if rng.random() < 0.5 else values[:-1]).tobytes()
    values[place] = rng.choice((-1, 0, 1, 5, 31, 32, 33, 2**31 - 1, -(2**31)))
    return values.tobytes()


def other_mask(rng: random.Random, old: bytes) -> bytes:
    """Return truth values with some of them changed."""
    return rng.choice((bytes(len(old)), b"\x01" * len(old), b"\x02" * len(old), old[:-1], old + b"\x01"))


def nearby(rng: random.Random, old: Tree) -> Tree:
    """Return a value close to a number, or a likely one."""
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        return anything(rng)
    return rng.choice(
        (old + 1, old - 1, -old, old * 2, float(old), old + 0.5, 0, None, not old, str(old))
    )


BY_FIELD: dict[str, Callable[[random.Random, Tree], Tree]] = {
    "logprobs": other_floats,
    "token_ids": other_tokens,
    "prompt_ids": other_tokens,
    "mask": other_mask,
    "id": lambda rng, old: rng.choice(TEXTS),
    "ticket_id": lambda rng, old: rng.choice(TEXTS),
}
"""How the value of a field is changed; `nearby` for other fields."""


def field_value(rng: random.Random, name: str, old: Tree) -> Tree:
    """Return another value for a field of this name, now and then of another type."""
    fits = isinstance(old, bytes) or name not in ("logprobs", "token_ids", "prompt_ids", "mask")
    change = BY_FIELD.get(name, nearby) if fits else nearby
    return anything(rng) if rng.random() < 0.2 else change(rng, old)
