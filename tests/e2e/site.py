"""A place for whole runs: a tiny model, questions, settings, and `penstock up` as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import wait_until
from tests.tiny_tokenizer import CALL, LETTERS, save_tokenizer

ROOT = Path(__file__).parents[2]
FAKE_PROCFILE = "learner: learner\nactor: python -m tests.actors.fake_actor\nrewarder: rewarder\n"
TALKS = {
    "FAKE_TALKS": "1",
    "LEARNER_ENVIRONMENT": str(Path(__file__).with_name("environments.py")) + ":Counter",
    "LEARNER_REWARDS": "environment,accuracy",
    "LEARNER_MAX_COMPLETION_LENGTH": "32",
    "ACTOR_EPISODE_WORKERS": "16",
}
"""The variables of a run whose rollouts are conversations with a live environment."""

AGENTS = {
    "LEARNER_ENVIRONMENT": "",
    "LEARNER_AGENT": str(Path(__file__).with_name("agents.py")) + ":count_up",
    "LEARNER_REWARDS": "environment",
    "LEARNER_EVAL_DATASET": "",
    "LEARNER_EVAL_STEPS": "0",
    "LEARNER_MAX_COMPLETION_LENGTH": "90",
}
"""What a run of agents, which own their loop, has in place of some of TALKS."""

REAL_PROCFILE = "learner: learner\nactor: actor\nrewarder: rewarder\n"


def make_model(
    folder: Path, max_position_embeddings: int = 128, *, talks: bool = False, call: str = CALL
) -> Path:
    """A Llama with random weights that reads single letters, and the tool call `call` if it `talks`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(LETTERS) + talks, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, talks=talks, call=call)
    return folder


def write_questions(path: Path, count: int) -> Path:
    """Sums of one digit each."""
    rows = [
        {"question": f"{n % 9 + 1}+{n % 7 + 1}=", "answer": str(n % 9 + n % 7 + 2)} for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replay(run_folder: Path, *arguments: str) -> dict[str, Any]:
    """What `penstock replay` finds, which trains the run again from its journal."""
    result = subprocess.run(
        [sys.executable, "-m", "penstock.deploy", "replay", "--json", str(run_folder), *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def moved(start: Path, run_folder: Path) -> float:
    """The largest difference of a weight between the model folder `start` and the last checkpoint."""
    checkpoint = max((run_folder / "checkpoints").glob("[0-9]*"))
    before, after = (load_file(folder / "model.safetensors") for folder in (start, checkpoint / "model"))
    return max(float((before[name] - after[name]).abs().max()) for name in before)


class Site:
    """A folder in which runs are made.

    `variables`, `command` and `cwd` may be changed before `start`. If the site `talks`, rollouts are
    conversations of two turns and more, whose tool calls are `call`.
    """

    def __init__(
        self, folder: Path, procfile: str, *, talks: bool = False, call: str = CALL, **variables: str
    ) -> None:
        self.folder = folder
        (folder / "Procfile").write_text(procfile)
        self.run_folder = folder / "runs" / "e2e"
        self.variables = (
            {
                "RUN_NAME": "e2e",
                "RUN_DIR": str(folder / "runs"),
                "RUN_LEASE_S": "3",
                "LEARNER_JOURNAL_SEGMENT_MIB": "0.005",  # many files
                "LEARNER_MODEL": str(make_model(folder / "model", talks=talks, call=call)),
                "LEARNER_DATASET": str(write_questions(folder / "train.jsonl", 200)),
                "LEARNER_EVAL_DATASET": str(write_questions(folder / "eval.jsonl", 10)),
                "LEARNER_NUM_GENERATIONS": "4",
                "LEARNER_GROUPS_PER_STEP": "4",
                "LEARNER_MAX_PROMPT_LENGTH": "20",
                "LEARNER_MAX_COMPLETION_LENGTH": "8",
                "LEARNER_LEARNING_RATE": "1e-4",
                "LEARNER_FILTER_ZERO_STD": "false",
                "LEARNER_ENTROPY_COEF": "0.01",  # moves the weights though no answer is ever right
                "LEARNER_MAX_LOGP_DIFFERENCE": "0",  # the fake engine's log-probabilities are its own
                "REWARDER_WORKERS": "1",
            }
            | (TALKS if talks else {})
            | variables
        )
        self.command = [sys.executable, "-m", "penstock.deploy"]
        self.cwd = ROOT
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> Self:
        """Start `penstock up`; its lines are collected. In a `with` it is stopped at the end."""
        self.process = self.launch(["up", "--procfile", str(self.folder / "Procfile"), *arguments])
        threading.Thread(target=self._collect, daemon=True).start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self, arguments: list[str]) -> subprocess.Popen[str]:
        """Start the command `penstock`; its output is a pipe."""
        return subprocess.Popen(
            [*self.command, *arguments], cwd=self.cwd, env=os.environ | self.variables,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def _collect(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait(self, timeout_s: float) -> int:
        """The run's exit code; fails with the last lines when it does not end in time."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            tail = "\n".join(self.lines[-40:])
            raise AssertionError(f"the run did not end in {timeout_s} s:\n{tail}") from error

    def stop(self) -> None:
        """End everything, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)

    def replay(self, *arguments: str) -> dict[str, Any]:
        """What `penstock replay` finds."""
        return replay(self.run_folder, *arguments)

    def moved(self) -> float:
        """How far the last checkpoint's weights are from those the run began with, at most."""
        return moved(self.folder / "model", self.run_folder)

    def steps(self) -> int:
        """Updates the run has recorded."""
        path = self.run_folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def pid_of(self, child: str) -> int:
        """The process id the supervisor last named for a child such as "actor.1"."""
        found = [
            match.group(1)
            for line in list(self.lines)
            if line.startswith(child) and (match := re.search(r"-- Started as process (\d+)", line))
        ]
        return int(found[-1])

    def kill(self, child: str) -> int:
        """kill -9 a child; returns the step the run was at."""
        step = self.steps()
        os.kill(self.pid_of(child), signal.SIGKILL)
        return step

    def wait_for(self, predicate: Callable[[], bool], what: str, timeout_s: float = 900) -> None:
        """Wait; fails with the run's last lines, or when the run ends first."""

        def check() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                tail = "\n".join(self.lines[-40:])
                raise AssertionError(f"the run ended while waiting for {what}:\n{tail}")
            return predicate()

        wait_until(check, what, timeout_s)
