"""The benchmark for GPUs runs on a CPU too, with tiny shapes; `make benchmarks` runs all its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

pytestmark = [pytest.mark.engine, pytest.mark.e2e]


def test_parts_run_alone_and_store_their_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path), "--parts"]
    ended = subprocess.run(
        [*command, "names", "mfu"], capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["names"]["figures"]["missing"] == []
    assert parts["mfu"]["figures"]["tiny"]["tokens_per_s"] > 0
    assert [part["error"] for part in parts.values()] == ["", ""]


def test_a_part_that_fails_or_is_late_is_reported(tmp_path: Path) -> None:
    failed = gpu.run_part("gpu_mfu", ["no such shape"], 300, tmp_path / "log")
    assert (failed["error"], failed["figures"]) == ("exit code 2", {})
    assert "no such shape" in (tmp_path / "log").read_text()
    late = gpu.run_part("gpu_mfu", ["tiny"], 0.01, tmp_path / "log")
    assert late["error"] == "took over 0.01 s"
