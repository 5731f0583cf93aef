"""LEARNER_RESUME with the path of a checkpoint: a run begins again from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.common.broker.local_server import LocalServer
from penstock.common.errors import ConfigError
from penstock.common.files.run_folder import RunFolder
from penstock.deploy.earlier_run import begin_from, find_checkpoint
from penstock.deploy.up import Up
from tests.e2e.forked import ForkedSite
from tests.e2e.site import FAKE_PROCFILE
from tests.judge import judge

pytestmark = pytest.mark.e2e


def steps_of(folder: Path) -> list[int]:
    """The steps in a run's metrics."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_begins_again_from_a_named_checkpoint_of_its_own(tmp_path: Path) -> None:
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS="6", LEARNER_SAVE_STEPS="2", LEARNER_EVAL_STEPS="2",
        LEARNER_SAVE_TOTAL_LIMIT="10",
    )  # fmt: skip
    site.start()
    assert site.wait(600) == 0, "\n".join(site.lines[-40:])
    site.stop()
    first = site.run_folder
    asked = first / "checkpoints" / "000001-00000002"
    site.variables |= {"LEARNER_RESUME": str(asked / "model"), "LEARNER_LEARNING_RATE": "3e-4"}
    site.lines.clear()
    for steps in ("6", "7"):  # the same path again lets the run go on
        site.variables["LEARNER_MAX_STEPS"] = steps
        site.start()
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
        site.stop()
    text = "\n".join(site.lines)
    moved = first.with_name("e2e.1")
    assert f"The run e2e begins after step 2 of {moved}" in text
    assert "Changed since the last start: LEARNER_LEARNING_RATE" in text
    assert steps_of(moved) == steps_of(first)[:-1] == [1, 2, 3, 4, 5, 6]
    old, new = ((one / "metrics.jsonl").read_text().splitlines() for one in (moved, first))
    assert old[:2] == new[:2]
    assert old[2:] != new[2:]
    claims = sorted(path.name for path in (first / "claims").iterdir())
    assert claims == ["000001.json", "000002.json", "000003.json"]
    for folder in (moved, first):
        assert judge(folder)["faults"] == []


def test_what_is_no_checkpoint_is_refused_with_those_that_are(tmp_path: Path) -> None:
    kept = tmp_path / "run" / "checkpoints" / "000001-00000004"
    kept.mkdir(parents=True)
    (kept / "state.json").write_text("{}")
    for wrong in (kept.with_name("000001-00000009"), tmp_path / "nowhere" / "x", tmp_path):
        with pytest.raises(ConfigError, match=r"expected auto, must, new, or the folder"):
            find_checkpoint(wrong)
    with pytest.raises(ConfigError, match="000001-00000004"):
        find_checkpoint(kept.with_name("000001-00000009"))
    assert find_checkpoint(kept / "model") == kept
    with pytest.raises(ConfigError, match=r"state\.json.*Name another checkpoint"):
        begin_from(kept, RunFolder(tmp_path / "new"), kept)
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_refused_before_the_run_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "x" / "checkpoints" / "000001-00000004"
    kept.mkdir(parents=True)
    (kept / "state.json").write_text("{}")
    for name, value in (
        ("RUN_NAME", "x"), ("RUN_DIR", str(tmp_path)), ("HOME", str(tmp_path)),
        ("LEARNER_RESUME", "~/x/checkpoints/000001-00000004"),
        ("LEARNER_MODEL", "m"), ("LEARNER_DATASET", "d"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    for manifest, words in ((None, "cannot be read"), ('{"state.json": "0"}', "differs from its hash")):
        if manifest:
            (kept / "manifest.json").write_text(manifest)
        with pytest.raises(ConfigError, match=rf"{words}.*Name another checkpoint"):
            Up().run()
    assert kept.is_dir()
    assert not (tmp_path / "x.1").exists()


@pytest.mark.parametrize("own_server", [True, False])
def test_a_run_goes_on_with_a_reward_that_was_edited(
    tmp_path: Path, private_server: LocalServer, own_server: bool
) -> None:
    """The contract that the last start left names the old code, and that the run has ended."""
    reward = tmp_path / "own.py"
    reward.write_text(
        "def own(completions, **_): return [float(n % 2) for n, _ in enumerate(completions)]"
    )
    site = ForkedSite(
        tmp_path, FAKE_PROCFILE, LEARNER_MAX_STEPS="3", LEARNER_EVAL_DATASET="",
        LEARNER_REWARDS=f"{reward}:own", **({} if own_server else {"REDIS_URL": private_server.url}),
    )  # fmt: skip
    for steps in (3, 6):
        site.variables["LEARNER_MAX_STEPS"] = str(steps)
        site.start()
        assert site.wait(600) == 0, "\n".join(site.lines[-40:])
        site.stop()
        reward.write_text(f"# edited\n{reward.read_text()}")
    assert steps_of(site.run_folder) == [1, 2, 3, 4, 5, 6]
    assert judge(site.run_folder)["faults"] == []
