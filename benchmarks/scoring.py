"""Measure what scoring costs, and whether a hung scoring process slows down the other one.

    python -m benchmarks.scoring

There are two scoring processes, and one thread scores as fast as possible. Rounds in which the other
process hangs alternate with rounds without a hang. The result is the rate with a hang divided by the
rate without; the goal is 0.9.

A user's function is scored too, bare and with numpy imported. Nearly all of its milliseconds per group
are the process of each call. The goal is 5 ms on a free machine. The figure is reported only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from penstock.common.config.settings import RewarderSettings
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

GOAL = 0.9
_WARM_UP = 100
"""Number of groups scored before the measurement starts."""
_HANG = "import time\ndef hang(completions):\n    time.sleep(3600)\n"
_OWN = {
    "own_ms": "def own(completions):\n    return [1.0] * len(completions)\n",
    "own_numpy_ms": "import numpy\ndef own(completions):\n    return numpy.ones(len(completions))\n",
}
_ACCURACY = RewardSpec("accuracy")
_GROUP: dict[str, list[Any]] = {
    "prompts": ["1+1="] * 8,
    "completions": [f"so it is <answer>{n}</answer>" for n in range(8)],
    "completion_ids": [[1]] * 8,
    "solution": ["4"] * 8,
}


def rate(pool: ScoringPool, seconds: float, reward: RewardSpec = _ACCURACY) -> float:
    """Return the groups per second that one thread scores after a warm-up.

    The warm-up fills the caches of a scoring process that replaced a killed one.
    """
    for _ in range(_WARM_UP):
        pool.score(reward, _GROUP)
    done, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        pool.score(reward, _GROUP)
        done += 1
    return done / (time.monotonic() - began)


def rate_beside_a_hang(pool: ScoringPool, hang: RewardSpec, seconds: float) -> float:
    """Return `rate` while another thread's scoring hangs in the other process for the whole time."""

    def wait() -> None:
        try:
            pool.score(hang, _GROUP)
        except ScoringFailed:
            return
        raise AssertionError("the scoring ended, expected it to hang")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    found = rate(pool, seconds)
    assert thread.is_alive(), "the hang ended before the round"
    thread.join()
    return found


def own_reward(folder: Path, name: str, code: str) -> RewardSpec:
    """Return the reward `name` of a file that is written with this code, for everybody to read."""
    path = folder / f"{name}.py"
    path.write_text(code)
    folder.chmod(0o755)
    digest = hashlib.sha256(code.encode()).hexdigest()
    return RewardSpec("hang" if code is _HANG else "own", source=str(path), digest=digest)


def main() -> int:
    """Print the ratio: median and range of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hang = own_reward(Path(folder), "hang", _HANG)
        own = {name: own_reward(Path(folder), name, code) for name, code in _OWN.items()}
        with ScoringPool(RewarderSettings(workers=2, timeout_s=options.seconds + 3.0)) as pool:
            ratios, rates = [], []
            costs: dict[str, list[float]] = {name: [] for name in own}
            for _ in range(options.rounds):
                free = rate(pool, options.seconds)
                ratios.append(rate_beside_a_hang(pool, hang, options.seconds) / free)
                rates.append(free)
                for name, reward in own.items():
                    costs[name].append(1000 / rate(pool, options.seconds, reward))
    found = {
        "rounds": options.rounds,
        "groups_per_s": round(statistics.median(rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
    } | {name: round(statistics.median(values), 2) for name, values in costs.items()}
    print(json.dumps(found) if options.json else "\n".join(f"{k:<14}{v}" for k, v in found.items()))
    return 0 if found["ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
