"""Edits of messages that keep their lengths consistent, so that only the meaning is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from tests.fuzz.hostile import anything
from tests.fuzz.packing import Pairs, Path, Tree, at, replaced, to_tree
from tests.fuzz.valid import KINDS, named_paths


class Message:
    """The tree of a message, edited by the names of fields: `put("group.actor", "x")`."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.kind = KINDS[tree[1]]

    @property
    def names(self) -> dict[str, Path]:
        """The path of each field by its name."""
        return {name: (2, *path) for name, path in named_paths(self.kind, self.tree[2]).items()}

    def ending(self, *ends: str) -> list[str]:
        """Return the names of the fields that end so, as ("logprobs",)."""
        return [name for name in self.names if name.rpartition(".")[2] in ends]

    def get(self, name: str) -> Tree:
        """Return the value of a field."""
        return at(self.tree, self.names[name])

    def put(self, name: str, value: object) -> None:
        """Change the value of a field."""
        self.tree = replaced(self.tree, self.names[name], to_tree(value))

    def put_all(self, end: str, value: object) -> None:
        """Change the value of every field whose name ends so."""
        for name in self.ending(end):
            self.put(name, value)


Edit = Callable[[random.Random, Message], None]


def _resized(rng: random.Random, message: Message) -> None:
    """Another number of tokens for one completion; all its arrays and spans agree."""
    name = rng.choice(message.ending("token_ids")).removesuffix(".token_ids")
    size = rng.choice((1, 4, 6, 8, 9, 64, 5_000))
    message.put(f"{name}.token_ids", np.full(size, 5, "<i4").tobytes())
    message.put(f"{name}.logprobs", np.full(size, -1.0, "<f4").tobytes())
    message.put(f"{name}.mask", b"\x01" * size)
    message.put(f"{name}.spans", [message.get(f"{name}.spans.0")])
    message.put(f"{name}.spans.0.start", 0)
    message.put(f"{name}.spans.0.end", size)


def _regrouped(rng: random.Random, message: Message) -> None:
    """One completion more, fewer, or none, everywhere."""
    rollouts = message.get("group.rollouts" if message.kind.__name__ == "ScoredGroup" else "rollouts")
    size = rng.choice((0, 1, 2, 4, 40))
    prefix = "group." if message.kind.__name__ == "ScoredGroup" else ""
    message.put(f"{prefix}rollouts", (rollouts * 40)[:size])
    message.put(f"{prefix}ticket.num_generations", size)
    if prefix:
        for name in [*message.names]:
            parts = name.split(".")
            if (parts[0] in ("rewards", "extra") and len(parts) == 2) or name in ("texts", "failures"):
                message.put(name, (list(message.get(name)) * 40)[:size])


def _rewards(rng: random.Random, message: Message) -> None:
    """One value for all rewards, or for one of them."""
    value = rng.choice((None, 0.0, 1e9, -1e9, 1e10, 1e100, 1e308, 2**63, True, "1", 5e-324))
    named = [name for name in message.names if name.startswith("rewards.") and name.count(".") == 2]
    for name in named if rng.random() < 0.4 else [rng.choice(named)] if named else []:
        message.put(name, value)


def _reward_names(rng: random.Random, message: Message) -> None:
    """Another name for a reward or a logged column, or one more, or one less."""
    name = rng.choice([one for one in ("rewards", "extra", "metrics") if one in message.names])
    flat = list(message.get(name).flat)
    other = rng.choice(
        ("step", "prompt", "reward", "extra", "accuracy", "", "loss", "x" * 300, "a\x00b")
    )
    if not flat:
        return
    value = [anything(rng) for _ in flat[1]] if name == "extra" else flat[1]
    change = rng.choice(([other, value, *flat[2:]], [*flat, other, value], flat[2:], flat + flat[:2]))
    message.tree = replaced(message.tree, message.names[name], Pairs(change))


def _versions(rng: random.Random, message: Message) -> None:
    """Another version in one or all spans."""
    version = [rng.choice((0, 1, 1, 2, 9, 2**40)), rng.choice((0, 1, 2, 3, 4, 9, 2**31, 2**62))]
    named = [name for name in message.names if name.endswith(".version") and "spans" in name]
    for name in named if rng.random() < 0.5 else [rng.choice(named)]:
        message.put(name, version)


def _columns(rng: random.Random, message: Message) -> None:
    """Another gold answer, another type of a value, one column more or less, another order."""
    (name,) = message.ending("columns")
    flat = list(message.get(name).flat)
    place = 2 * rng.randrange(len(flat) // 2)
    value = rng.choice(("13", 3.0, 3, True, None, "", [], anything(rng)))
    change = rng.choice((
        [*flat[: place + 1], value, *flat[place + 2 :]], [*flat, rng.choice(("x", 1, b"x")), value],
        flat[:place] + flat[place + 2 :], flat[2:] + flat[:2], [*flat, *flat[:2]],
    ))  # fmt: skip
    message.tree = replaced(message.tree, message.names[name], Pairs(change))


def _wide(rng: random.Random, message: Message) -> None:
    """Far more of something than anyone sends."""
    name = rng.choice(
        [*message.ending("columns", "extra", "metrics", "rewards"), *message.ending("texts", "reason")]
    )
    value = message.get(name)
    wide = {f"c{number}": 1.0 for number in range(rng.choice((50, 1_500)))}
    message.put(name, wide if isinstance(value, Pairs) else "x" * 200_000)


def _unmasked(rng: random.Random, message: Message) -> None:
    """No token of any completion is trained."""
    for name in message.ending("mask"):
        message.put(name, bytes(len(message.get(name))))


def _verdict(rng: random.Random, message: Message) -> None:
    """Rewards and lengths of a verdict in other relations."""
    size = rng.choice((0, 1, 2, 3, 4))
    message.put(
        "rewards",
        {name: [rng.choice((None, 1.0, 0.0)) for _ in range(size)] for name in ("accuracy", "format")},
    )
    lengths = [
        rng.choice((1, 3, 0, -1, 2**31, 2**63, 2**64 - 1)) for _ in range(rng.choice((0, 1, 2, 3)))
    ]
    message.put("lengths", lengths if rng.random() < 0.7 else [3] * size)


def _foreign(rng: random.Random, message: Message) -> None:
    """Another ticket, contract or purpose, in every field that names it."""
    end, value = rng.choice((
        ("contract", "0" * 16), ("contract", ""), ("id", "train:8"), ("ticket_id", "train:8"),
        ("id", "eval:1.3:0"), ("id", "eval:1.2:0"), ("purpose", "eval"), ("min_step", 0),
        ("version", [1, 1]),
        ("actor", ""), ("rewarder", "\x1b[2J"), ("seed", 7), ("temperature", 0.5), ("max_tokens", 4096),
    ))  # fmt: skip
    message.put_all(end, value)


EDITS: dict[str, tuple[Edit, ...]] = {
    "ScoredGroup": (
        _resized, _regrouped, _rewards, _rewards, _reward_names, _versions, _versions, _columns,
        _columns, _wide, _unmasked, _foreign, _foreign,
    ),
    "Group": (_resized, _regrouped, _versions, _columns, _unmasked, _foreign),
    "Ticket": (_columns, _foreign, _wide),
    "Verdict": (_rewards, _reward_names, _verdict, _verdict, _wide, _foreign),
    "Weights": (_foreign,),
    "Contract": (_foreign,),
}  # fmt: skip
"""The edits that fit a message, by its name; the likelier ones are there twice."""
