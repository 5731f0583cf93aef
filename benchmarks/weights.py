"""Measure what a new version of the weights costs as a delta: its bytes, and the time of each stage.

    python -m benchmarks.weights [--run RUN_FOLDER] [--rounds 5] [--json]

Without `--run` a random bfloat16 model of 64 million parameters is trained for a few Updates by the
learner's own policy (AdamW with float32 master weights, learning rate 1e-6), and each Update's version
is compared with the one before. With `--run` the versions in a run's folder are compared. All times are
processor time on one core, in ms per GB of weights. benchmarks/README.md says how to read them.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors.torch import load_file, save_file

from penstock.common.files.hashing import hash_file
from penstock.common.transfer import delta
from penstock.common.transfer.download import Source, Wanted, download
from penstock.common.wire.messages import DELTA_FILE, WEIGHTS_FILE
from penstock.learner.state.file_server import FileServer

WIDTH, LAYERS, UPDATES = 768, 7, 3
NAME = "000001-00000001"
BARE, HASHED, RATIO = "a fresh safetensors file", "hash and write", "hash and write / a fresh file"
GOALS = {"bytes per change": 1.3, "sender": 350.0, "receiver": 300.0, RATIO: 1.3}


def train(folder: Path) -> list[Path]:
    """Train a random model; return the files of its versions."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.gpu_learner import make_batch
    from penstock.common.config.learner_settings import LearnerSettings
    from penstock.learner.policy.policy import Policy
    from tests.tiny_tokenizer import save_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    settings = LearnerSettings(
        dtype="bfloat16", learning_rate=1e-6, micro_batch_tokens=4096, num_generations=4
    )
    policy = Policy(folder / "model", settings, 10)
    files = []
    try:
        for step in range(UPDATES + 1):
            (folder / str(step)).mkdir()
            policy.export(folder / str(step), "version")
            files.append(folder / str(step) / WEIGHTS_FILE)
            policy.update(make_batch(tiny=False), 0)
    finally:
        policy.close()
    return files


def take_ms(work: Callable[[], Any], size: int) -> float:
    """The milliseconds of processor time that the work takes, per GB of a file of so many bytes."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e12 / size


def scan(old: Path, new: Path) -> int:
    """Compare two files; return how many entries a delta has, those for long gaps among them."""
    entries = delta._Entries.room_for(delta._WORDS)
    before, after = (np.memmap(one, "<u2", "r") for one in (old, new))
    blocks = [slice(begin, begin + delta._WORDS) for begin in range(0, len(after), delta._WORDS)]
    return sum(delta._compare(before[block], after[block], entries) for block in blocks)


def decode(found: Path, size: int) -> None:
    """Read the entries of a delta for a file of so many bytes."""
    with found.open("rb") as file:
        file.read(len(delta._MAGIC))
        for begin in range(0, size // 2, delta._WORDS):
            delta._read_block(file, min(delta._WORDS, size // 2 - begin))


def copy(file: Path, target: Path) -> None:
    """Write a fresh file with the content of another one, by blocks."""
    with target.open("wb", buffering=0) as made:
        for block in delta._blocks(file):
            made.write(block.view(np.uint8).data)


def send(server: FileServer, file: Path, target: Path, size: int) -> float:
    """The ms per GB of weights in which a file of a version comes over loopback and is hashed."""
    wanted = Wanted(f"versions/{NAME}/{file.name}", file.stat().st_size, hash_file(file))
    source = Source(f"http://127.0.0.1:{server.port}", server.token)
    target.unlink(missing_ok=True)
    return take_ms(lambda: download(source, wanted, target), size)


def stages(old: Path, new: Path, server: FileServer, folder: Path) -> dict[str, float]:
    """The ms per GB of each stage, of the two sides, and of what they are compared with."""
    size, made, got = new.stat().st_size, folder / "made", folder / "got"
    found, whole = (folder / "versions" / NAME / name for name in (DELTA_FILE, WEIGHTS_FILE))
    content, state = new.read_bytes(), load_file(new)
    made.unlink(missing_ok=True)
    sender = take_ms(lambda: delta.write_delta([old], [new], found, size), size)
    scanned = take_ms(lambda: scan(old, new), size)
    receiver = take_ms(lambda: delta.apply_deltas([old], [found], [made]), size)
    made.unlink()
    decoded = take_ms(lambda: decode(found, size), size)
    copied = take_ms(lambda: copy(old, made), size)
    hashed = take_ms(lambda: hash_file(new), size)
    made.unlink()
    bare = take_ms(lambda: save_file(state, made), size)
    made.unlink()
    version = take_ms(lambda: (save_file(state, made), hash_file(made)), size)
    return {
        "sender": sender, "scan": scanned, "encode and write": sender - scanned,
        "send the delta": send(server, found, got, size),
        "receiver": receiver, "decode": decoded, "copy to a fresh file": copied, "hash": hashed,
        "apply": receiver - decoded - copied - hashed,
        "send the whole file": send(server, whole, got, size),
        "memcpy": take_ms(lambda: bytearray(content), size),
        BARE: bare, HASHED: version, RATIO: version / bare,
        "XOR and zstd-1": take_ms(lambda: xor(old, new), size),
    }  # fmt: skip


def xor(old: Path, new: Path) -> int:
    """The bytes of what differs, by XOR and zstd."""
    before, after = (np.fromfile(one, np.uint16) for one in (old, new))
    return len(zstandard.ZstdCompressor(level=1).compress((before ^ after).data))


def sizes(old: Path, new: Path, folder: Path) -> dict[str, float]:
    """What one delta needs, and other forms of it, in bytes per changed entry, after a round trip."""
    before, after = (np.fromfile(one, np.uint16) for one in (old, new))
    places = np.flatnonzero(before != after).astype(np.int32)
    values, changed = after[places], len(places)
    before[places] = values
    assert np.array_equal(before, after), "int32 and bf16 are not exact"
    share = changed / len(after)
    place = -np.log2(share) - (1 - share) / share * np.log2(1 - share)
    written = delta.write_delta([old], [new], folder / "delta", new.stat().st_size)
    delta.apply_deltas([old], [folder / "delta"], [folder / "made"])
    assert filecmp.cmp(folder / "made", new, shallow=False), "the round trip is not exact"
    return {
        "bytes of the file": new.stat().st_size, "changed": share, "bytes of the delta": written,
        "bytes per change": written / changed, "entropy of place and sign": (place + 1) / 8,
        "int32 and bf16": (places.nbytes + values.nbytes) / changed,
        "XOR and zstd-1": xor(old, new) / changed,
    }  # fmt: skip


def measure(files: list[Path], rounds: int, folder: Path) -> dict[str, Any]:
    """The sizes for each pair of versions, and the times of the last pair in each round."""
    pairs = list(pairwise(files))
    served = folder / "versions" / NAME
    served.mkdir(parents=True)
    (served / WEIGHTS_FILE).symlink_to(files[-1].absolute())
    with FileServer(folder / "versions", folder, [], "127.0.0.1", 0) as server:
        stages(*pairs[-1], server, folder)  # compiles, and brings the files into memory
        times = [stages(*pairs[-1], server, folder) for _ in range(rounds)]
    figures = {"median": statistics.median, "least": min, "most": max}
    spread = {
        name: {kind: of([one[name] for one in times]) for kind, of in figures.items()}
        for name in times[0]
    }
    return {"sizes": [sizes(*pair, folder) for pair in pairs], "ms per GB": spread}


def show(found: dict[str, Any]) -> None:
    """Print both tables, and which goals are missed."""
    for one in found["sizes"]:
        print("  ".join(f"{name} {value:,.3g}" for name, value in one.items()))
    print(f"{'ms per GB of weights, one core':32}{'median':>8}{'least':>8}{'most':>8}")
    for name, row in found["ms per GB"].items():
        print(f"{name:32}" + "".join(f"{value:8.4g}" for value in row.values()))
    reached = {name: row["median"] for name, row in found["ms per GB"].items()}
    reached["bytes per change"] = max(one["bytes per change"] for one in found["sizes"])
    for name, goal in GOALS.items():
        missed = "MISSED: " if reached[name] > goal else ""
        print(f"{missed}{name} {reached[name]:.4g}, goal at most {goal:g}")


def main() -> int:
    """Measure, and print the tables; return 1 if there are too few versions."""
    parser = argparse.ArgumentParser(prog="benchmarks.weights", description=__doc__)
    parser.add_argument("--run", type=Path, help="the folder of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-weights-") as name:
        folder = Path(name)
        if arguments.run:
            files = sorted(arguments.run.glob(f"versions/*/{WEIGHTS_FILE}"))
        else:
            files = train(folder)
        if len(files) < 2:
            print(f"{arguments.run} has {len(files)} versions of whole weights, expected 2 at least")
            return 1
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found = measure(files, arguments.rounds, folder)
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
