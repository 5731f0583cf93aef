"""The machine in the journal's header and the checkpoint: another one is said, once."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs

import penstock.learner.state.fingerprint
from penstock.common.journal.segments import read_journal
from penstock.learner.state.fingerprint import this_machine
from tests.learner.whole import Killed


def warnings(logs) -> list[str]:
    return [entry["differs"] for entry in logs if entry["event"].startswith("This is another machine")]


def test_a_machine_is_known_by_what_decides_the_last_bits():
    machine = this_machine()
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == torch.get_num_threads()
    assert machine["CPU capability"] == torch.backends.cpu.get_cpu_capability()
    assert {"ranks", "platform", "CPU", "device"} <= machine.keys()
    assert all(str(value) for value in machine.values())


def test_the_journals_header_names_it(run):
    run.start(steps=1)
    (header,) = [record for _, record in read_journal(run.run_folder, 1) if record["kind"] == "header"]
    assert header["machine"] == this_machine()


@pytest.mark.parametrize("save_steps", [1, 50], ids=["checkpoint", "journal"])
def test_a_resume_elsewhere_is_said_in_one_line_and_one_at_home_is_not(run, monkeypatch, save_steps):
    for _ in range(2):
        with capture_logs() as logs, pytest.raises(Killed):
            run.start(steps=6, dies_in=2, save_steps=save_steps)
        assert warnings(logs) == []
    here = this_machine()["CPU"]
    monkeypatch.setattr(penstock.learner.state.fingerprint, "_cpu_name", lambda: "abacus")
    with capture_logs() as logs:
        run.start(steps=6, save_steps=save_steps)
    assert warnings(logs) == [f"CPU was {here} and is abacus"]


def test_another_machine_in_the_checkpoint_and_after_it_is_said_once(run, monkeypatch):
    here = this_machine()["CPU"]
    monkeypatch.setattr(penstock.learner.state.fingerprint, "_cpu_name", lambda: "abacus")
    for dies_in in (2, 1):  # the second leaves a header and no checkpoint
        with pytest.raises(Killed):
            run.start(steps=6, dies_in=dies_in, save_steps=1)
    monkeypatch.undo()
    with capture_logs() as logs:
        run.start(steps=6)
    assert warnings(logs) == [f"CPU was abacus and is {here}"]
