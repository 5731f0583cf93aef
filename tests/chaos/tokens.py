"""What became of each sampled token, by the diary of the fake engines.

A line of the diary says that a request could sample at most so many tokens of a completion, how many it
did, and whether the completion ended. The next request of the same completion has to go on from there.

    {"ticket": "train:7", "index": 2, "most": 32, "sampled": 11, "ended": false}
    {"ticket": "train:7", "index": 2, "most": 21, "sampled": 5, "ended": true}     continued: none lost
    {"ticket": "train:7", "index": 2, "most": 32, "sampled": 16, "ended": true}    begun anew: 11 lost
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Tokens:
    """Sampled tokens in all, those that a second actor went on from, and those that none did."""

    sampled: int = 0
    continued: int = 0
    lost: int = 0


def read_diary(path: Path) -> Tokens:
    """Read the diary of all engines of a run; a run without one has sampled nothing."""
    return count_tokens(map(json.loads, path.read_text().splitlines() if path.is_file() else []))


def count_tokens(lines: Iterable[dict]) -> Tokens:
    """Compare each request with the one before of the same completion."""
    found = Tokens()
    before: dict[tuple[str, int], dict] = {}
    for line in lines:
        found.sampled += line["sampled"]
        key = line["ticket"], line["index"]
        if (last := before.get(key)) is not None:
            left = last["most"] - last["sampled"]
            found.lost += line["sampled"] if last["ended"] else max(0, line["most"] - left)
            found.continued += last["sampled"] * (not last["ended"] and line["most"] == left)
        before[key] = line
    return found
