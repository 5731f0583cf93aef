"""A judge of a run that trusts nobody: `python -m tests.judge RUN_FOLDER`.

It reads the journal with its own few lines, not with the learner's, and never looks at the ledger's
counters. Its verdict: no training ticket twice in a batch, every issued ticket in exactly one end
state, numbers without a gap, steps without a gap.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack

STATES = {"trained", "filtered", "stale", "dead", "evaluated", "unused"}


def read_records(run_folder: Path) -> list[tuple[int, Any]]:
    """The surviving lineage's records, each with its incarnation, along the chain of claims."""
    claims = {
        claim["incarnation"]: claim
        for claim in map(json.loads, (p.read_text() for p in (run_folder / "claims").glob("*.json")))
    }
    chain, incarnation, length = [], max(claims), None
    while incarnation:
        chain.append((incarnation, length))
        length = claims[incarnation]["parent_length"]
        incarnation = claims[incarnation]["parent"]
    return [
        (incarnation, record)
        for incarnation, length in reversed(chain)
        for record in _parse(_read_files(run_folder / "journal", incarnation)[:length])
    ]


def _read_files(folder: Path, incarnation: int) -> bytes:
    """An incarnation's journal: its files one after the other, as far as none is missing."""
    data = b""
    for path in sorted(folder.glob(f"{incarnation:06d}-*.journal")):
        if int(path.stem[7:]) != len(data):
            break
        data += path.read_bytes()
    return data


def _parse(data: bytes) -> list[Any]:
    records, offset = [], 0
    while offset + 12 <= len(data):
        size, checksum = struct.unpack_from("<QI", data, offset)
        body = data[offset + 12 : offset + 12 + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        records.append(msgpack.unpackb(zlib.decompress(body), raw=False, strict_map_key=False))
        offset += 12 + size
    return records


def _tickets_of(group: bytes) -> str:
    """A ScoredGroup is [schema, name, [group, ...]], a group [ticket, ...], a ticket [id, ...]."""
    return msgpack.unpackb(group, raw=False, strict_map_key=False)[2][0][0][0]


def judge(run_folder: Path) -> dict[str, Any]:
    """What the journal says of a finished run; `faults` is empty if it is sound."""
    faults: list[str] = []
    trained: Counter[str] = Counter()
    ends: dict[str, list[str]] = {}
    issued: set[str] = set()
    steps: list[int] = []
    resumed_at: list[int] = []
    next_number, ended = 0, False
    for _, record in read_records(run_folder):
        next_number = max(next_number, record["ledger"]["next_number"])
        if record["kind"] == "header":
            resumed_at.append(record["step"])
        if record["kind"] == "batch":
            steps.append(record["step"])
            trained.update(map(_tickets_of, record["groups"]))
        if record["kind"] == "evaluation":
            issued |= {f"eval:{record['version']}:{i}" for i in record["asked"]}
        for ticket, (state, _) in record["ends"].items():
            ends.setdefault(ticket, []).append(state)
        ended |= record["kind"] == "end"
    issued |= {f"train:{number}" for number in range(next_number)}
    faults += [f"{ticket} was trained {n} times" for ticket, n in trained.items() if n > 1]
    faults += [f"{ticket} ended {len(s)} times: {s}" for ticket, s in ends.items() if len(s) > 1]
    faults += [f"{ticket} ended as {s[0]!r}" for ticket, s in ends.items() if s[0] not in STATES]
    faults += [f"{ticket} never ended" for ticket in sorted(issued - set(ends))]
    faults += [f"{ticket} ended but was never issued" for ticket in sorted(set(ends) - issued)]
    said = {ticket for ticket, states in ends.items() if states == ["trained"]}
    faults += [f"{ticket} differs between batch and end state" for ticket in said ^ set(trained)]
    if steps != list(range(1, len(steps) + 1)):
        faults.append(f"steps are not 1..n in order: {steps}")
    if not ended:
        faults.append("the run has no end record")
    return {
        "faults": faults,
        "issued": len(issued),
        "states": dict(Counter(states[0] for states in ends.values())),
        "steps": len(steps),
        "resumed_at": resumed_at[1:],
    }


if __name__ == "__main__":
    verdict = judge(Path(sys.argv[1]))
    print(json.dumps(verdict, indent=1))
    sys.exit(1 if verdict["faults"] else 0)
