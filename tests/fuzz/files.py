"""Mutated files of a run: what is changed in each kind of file."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from blake3 import blake3
from pyarrow import ArrowException, parquet

from penstock.common.wire.codec import unpack
from penstock.learner.report.completions import to_parquet
from tests.fuzz.hostile import TEXTS, nearby
from tests.fuzz.mutate import mutated, other_bytes, other_structure
from tests.fuzz.packing import at, paths, replaced, to_bytes, to_json, to_tree
from tests.fuzz.valid import Sample

PREFIX = struct.Struct("<QI")

Change = Callable[[random.Random, Path, Sequence[Sample]], None]
"""Changes a file in place. The samples are valid messages, to be put into the journal's records."""


def damage(rng: random.Random, path: Path, _samples: Sequence[Sample]) -> None:
    """Change bytes, as a bad disk does."""
    data = path.read_bytes()
    for _ in range(rng.choice((1, 1, 2))):
        data = other_bytes(rng, data, data)
    path.write_bytes(data)


def rewrite_json(rng: random.Random, path: Path, _samples: Sequence[Sample]) -> None:
    """Change the content of a JSON file; a checkpoint's manifest gets the new hash."""
    rows = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    place = rng.randrange(len(rows))
    tree = to_tree(json.loads(rows[place]))
    for _ in range(rng.choice((1, 1, 2))):
        tree = other_structure(rng, tree, tree)
    rows[place] = to_json(tree)
    path.write_text("".join(f"{row}\n" for row in rows), errors="surrogatepass")
    if path.name == "state.json":
        manifest = path.with_name("manifest.json")
        hashes = json.loads(manifest.read_text())
        hashes[path.name] = blake3(path.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(hashes))


def rewrite_record(rng: random.Random, path: Path, samples: Sequence[Sample]) -> None:
    """Change the content of a journal's record; its checksum fits."""
    data = path.read_bytes()
    starts = records(data)
    start, end = rng.choice(starts)
    body = data[start + PREFIX.size : end]
    how = rng.random()
    if how < 0.05:
        body = bomb()
    elif how < 0.15:
        body = other_bytes(rng, body, body)
    elif how < 0.2:
        body = zlib.compress(other_bytes(rng, zlib.decompress(body), body))
    else:
        tree = to_tree(unpack(zlib.decompress(body)))
        path_in = rng.choice(paths(tree))
        if isinstance(at(tree, path_in), bytes) and len(at(tree, path_in)) > 64:
            tree = replaced(tree, path_in, mutated(rng, samples)[1])
        elif rng.random() < 0.3:
            tree = replaced(tree, path_in, nearby(rng, at(tree, path_in)))
        else:
            tree = other_structure(rng, tree, tree)
        body = zlib.compress(to_bytes(tree))
    path.write_bytes(data[:start] + PREFIX.pack(len(body), zlib.crc32(body)) + body + data[end:])


@cache
def bomb() -> bytes:
    """A megabyte that decompresses to 256 of them."""
    made = zlib.compressobj(1)
    return b"".join([*(made.compress(bytes(1 << 20)) for _ in range(256)), made.flush()])


def records(data: bytes) -> list[tuple[int, int]]:
    """Return start and end of each record of a journal's file."""
    found, start = [], 0
    while start < len(data):
        end = start + PREFIX.size + PREFIX.unpack_from(data, start)[0]
        found.append((start, end))
        start = end
    return found


def rewrite_table(rng: random.Random, path: Path, _samples: Sequence[Sample]) -> None:
    """Change values of a column of a Parquet file, or leave a column out."""
    rows = parquet.read_table(path).to_pylist()
    name = rng.choice([*rows[0]])
    value = rng.choice((None, 7, -1, 2**62, 1.5, float("nan"), "x", b"\xff", [1], {"a": 1}, *TEXTS[:8]))
    for row in rows:
        if value is None and rng.random() < 0.7:
            del row[name]
        else:
            row[name] = value
    try:
        path.write_bytes(to_parquet(rows))
    except (ArrowException, UnicodeEncodeError):
        path.write_bytes(b"PAR1")


CHANGES: dict[str, tuple[str, Change]] = {
    "damaged journal": ("journal/*.journal", damage),
    "rewritten journal": ("journal/*.journal", rewrite_record),
    "damaged claim": ("claims/*.json", damage),
    "rewritten claim": ("claims/*.json", rewrite_json),
    "damaged checkpoint": ("checkpoints/*/*.json", damage),
    "rewritten checkpoint": ("checkpoints/*/*.json", rewrite_json),
    "damaged best": ("best/*/best.json", damage),
    "rewritten best": ("best/*/best.json", rewrite_json),
    "damaged lines": ("*.jsonl", damage),
    "rewritten lines": ("*.jsonl", rewrite_json),
    "damaged results": ("eval_results.json", damage),
    "rewritten results": ("eval_results.json", rewrite_json),
    "damaged table": ("completions/*.parquet", damage),
    "rewritten table": ("completions/*.parquet", rewrite_table),
    "damaged nonce": ("nonce", damage),
}
"""By kind of case: the files of the run, and the change to one of them."""

SHARES = (8, 16, 3, 6, 3, 8, 1, 4, 3, 8, 1, 2, 2, 3, 1)
"""How often each kind of CHANGES is chosen."""
