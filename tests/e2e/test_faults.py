"""Faults of network, server, disk and processes in one run: `python -m tests.faults` in short."""

from __future__ import annotations

import shutil

import pytest

from tests.faults import kinds
from tests.faults.trial import Plan, run_faults

pytestmark = pytest.mark.e2e

KINDS = (
    "resets", "replies cut", "stopped", "clock +1 h", "READONLY", "BUSY", "memory full", "disk full",
)  # fmt: skip


def test_a_run_that_meets_faults_of_many_kinds_loses_nothing(tmp_path):
    verdict = run_faults(tmp_path, 1, Plan(KINDS, count=len(KINDS), share=0.3), lease_s=1.0)
    assert verdict.faults == []
    compiles = shutil.which("cc") or shutil.which("gcc")
    assert {met.kind for met in verdict.met} == {
        name for name in KINDS if compiles or not kinds.KINDS[name].on_host
    }
    assert verdict.states["trained"] > 4 * len(KINDS)
