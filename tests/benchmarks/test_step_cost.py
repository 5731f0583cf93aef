"""The benchmark of a step's cost: whose processor time is counted where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import step_cost
from benchmarks.step_cost import Costs

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_children_that_have_ended_count_for_who_started_them(tmp_path: Path) -> None:
    (tmp_path / "learner").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    supervisor = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'learner')!r}])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", supervisor], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = step_cost.cpu_by_process(psutil.Process(process.pid))
    finally:
        process.communicate(timeout=300)
    assert found.keys() == {"supervisor", "learner"}
    assert found["learner"] >= 0.3


def test_a_process_that_starts_later_counts_in_full() -> None:
    first = Costs(10, 100.0, {"learner": 4.0})
    last = Costs(20, 130.0, {"learner": 9.0, "actor": 20.0})
    assert step_cost.per_step(first, last) == {"actor": 2.0, "learner": 0.5}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["VLLM::EngineCore_DP0"], "vLLM EngineCore"),
        (["/x/bin/python3", "/x/bin/rewarder"], "rewarder"),
        (["/x/valkey-server", "/tmp/queue.conf"], "queue server"),
        (["/x/bin/python3", "-c", "learner"], ""),
        ([], ""),
    ],
)
def test_a_process_is_named_by_its_program(words: list[str], name: str) -> None:
    class Process:
        def cmdline(self) -> list[str]:
            return words

    assert step_cost.name_of(Process()) == name  # type: ignore[arg-type]
