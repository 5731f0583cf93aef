"""Measure what the pipeline adds to generation and training that take known times.

    python -m benchmarks.pipeline [--steps 30] [--json]

Learner, rewarder, actor and queue server are the product's, in processes of their own. An Update and the
generation of a group are waits (benchmarks/pipeline_roles.py). A quarter of the groups has equal rewards
and is replaced (dynamic sampling). The asynchronous runs allow a lag of 2 versions. A step can
take no less time than its Update, and no less than the engine needs for its groups, the replaced ones
included. The longer one of the two is the limit. The goal is 97% of it. In the synchronous run (lag 0)
training waits for generation: the limit is the sum of both, with the rounds of generation simulated.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pipeline_roles import PLACES
from penstock.common.files.atomic import read_json_lines
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint
from penstock.deploy.profile import profile_of

GOAL = 0.97
GROUPS = 64
"""Groups of a step."""
GROUP_S = 0.3
"""Seconds that the engine takes for a group."""
FILTERED = 0.25
"""Share of the questions whose groups have equal rewards."""
FIRST_STEP = 5
"""Steps after which counting begins: the first ones fill the pipeline."""
_ROOT = Path(__file__).parents[1]
_LIMIT_S = 900.0
_REWARD = """
def spread(completions, equal, **columns):
    return [float(number % 2 and not one) for number, one in enumerate(equal)]
"""


@dataclass(frozen=True, slots=True)
class Mode:
    """A run: its name, the lag in versions that it allows, and the seconds of an Update."""

    name: str
    max_staleness: int
    update_s: float

    @property
    def limit_s(self) -> float:
        """The shortest time of a step."""
        if self.max_staleness == 0:
            return self.update_s + synchronous_s()
        return max(self.update_s, generation_s())


def generation_s() -> float:
    """The engine's time for the groups of a step when all of its places are always in use."""
    return GROUPS / (1 - FILTERED) * GROUP_S / PLACES


def synchronous_s(rounds: int = 2000) -> float:
    """The mean time from GROUPS tickets to as many groups with signal, if no other tickets are there.

    A group without signal is replaced as soon as it is there. Its replacement waits for a place.
    """
    draw, times = random.Random(1), []
    for _ in range(rounds):
        waiting, ends, missing, now = GROUPS, [], GROUPS, 0.0
        while missing:
            while waiting and len(ends) < PLACES:
                waiting -= 1
                heapq.heappush(ends, now + GROUP_S)
            now = heapq.heappop(ends)
            if draw.random() < FILTERED:
                waiting += 1
            else:
                missing -= 1
        times.append(now)
    return statistics.mean(times)


def modes() -> list[Mode]:
    """Generation takes longer than the Update, as long, and less long; and one run without any lag."""
    even = generation_s()
    return [
        Mode("generation is slower", 2, even / 2),
        Mode("both take as long", 2, even),
        Mode("the Update is slower", 2, even * 1.5),
        Mode("synchronous", 0, even),
    ]


def write_inputs(folder: Path) -> dict[str, str]:
    """Write model, questions and reward into the folder; return the settings that name them."""
    tokenizer = make_tokenizer()
    save_checkpoint(make_model(tokenizer), tokenizer, folder / "model")
    draw = random.Random(0)
    rows = [
        {"question": f"{n % 90 + 10}+{n // 90 + 10}=", "answer": "0", "equal": draw.random() < FILTERED}
        for n in range(8000)
    ]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text(_REWARD)
    (folder / "Procfile").write_text(
        "learner: python -m benchmarks.pipeline_roles learner\n"
        "actor: python -m benchmarks.pipeline_roles actor\nrewarder: rewarder\n"
    )
    return {
        "LEARNER_MODEL": str(folder / "model"), "LEARNER_DATASET": str(folder / "questions.jsonl"),
        "LEARNER_REWARDS": f"{folder / 'reward.py'}:spread", "LEARNER_GROUPS_PER_STEP": str(GROUPS),
        "LEARNER_NUM_GENERATIONS": "8", "LEARNER_MAX_PROMPT_LENGTH": "16",
        "LEARNER_MAX_COMPLETION_LENGTH": "5", "LEARNER_SAVE_STEPS": "1000", "RUN_DIR": str(folder),
        "REWARDER_WORKERS": "1", "OMP_NUM_THREADS": "1", "PIPELINE_GROUP_S": str(GROUP_S),
        "PIPELINE_SIGMA": "0",
    }  # fmt: skip


def measure(folder: Path, settings: dict[str, str], mode: Mode, steps: int) -> float:
    """Run a mode with the settings of `write_inputs`; return the mean seconds of a step."""
    name = mode.name.replace(" ", "-")
    variables = os.environ | settings | {
        "RUN_NAME": name, "LEARNER_MAX_STEPS": str(steps), "PIPELINE_UPDATE_S": str(mode.update_s),
        "LEARNER_MAX_STALENESS": str(mode.max_staleness), "PYTHONPATH": str(_ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "penstock.deploy", "up", "--procfile", str(folder / "Procfile")]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(
            command, env=variables, cwd=_ROOT, stdout=log, stderr=log, timeout=_LIMIT_S, check=True
        )
    return step_seconds(folder / name / "metrics.jsonl")


def step_seconds(metrics: Path) -> float:
    """The mean seconds of the steps after FIRST_STEP, by the phases of the learner, which add up."""
    counted = read_json_lines(metrics)[FIRST_STEP - 1 :]  # `profile_of` leaves the first one out
    return sum(phase["seconds"] for phase in profile_of(counted).rows if phase["role"] == "learner")


def main() -> int:
    """Measure all modes; return 1 if an asynchronous one is below the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline", description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-pipeline-"))
    folder.chmod(0o755)
    settings = write_inputs(folder)
    shares: list[float] = []
    for mode in modes():
        step_s, limit_s = measure(folder, settings, mode, options.steps), mode.limit_s
        if mode.max_staleness:
            shares.append(limit_s / step_s)
        if options.json:
            print(json.dumps({"run": mode.name, "step_s": step_s, "limit_s": limit_s}), flush=True)
        else:
            reached = f"{limit_s / step_s:.1%} of the limit"
            print(
                f"{mode.name:<22} Update {mode.update_s:.2f} s  generation {generation_s():.2f} s  "
                f"step {step_s:.3f} s  limit {limit_s:.3f} s  {reached}", flush=True,
            )  # fmt: skip
    return int(min(shares) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
