"""`penstock check`: the learner's and the rewarder's processes on small files."""

from __future__ import annotations

import io
import json

import pytest

from penstock.common.config.command import execute_command, load
from penstock.deploy.check import Check
from penstock.learner.__main__ import Learner
from penstock.rewarders.__main__ import Rewarder
from tests.e2e.site import make_model

UNREADABLE = "It is what the reader thinks."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture
def check(tmp_path, monkeypatch, model):
    """Runs the check on these gold answers; returns exit code and printed JSON or text."""

    def run(golds, *flags, **settings):
        rows = [{"question": f"{n}+1=", "answer": gold, "level": n} for n, gold in enumerate(golds)]
        data = tmp_path / "q.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)))
        given = {
            "LEARNER_MODEL": model, "LEARNER_DATASET": data, "LEARNER_MAX_PROMPT_LENGTH": 20,
            "LEARNER_MAX_COMPLETION_LENGTH": 20, "LEARNER_DATASET_SHUFFLE": "false", **settings,
        }  # fmt: skip
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        return load(Check, "penstock check", list(flags)).execute()

    return run


OWN = """
def level(completions, level, **columns):
    return [1.0] * len(completions)

def missing(completions, difficulty, **columns):
    return [1.0] * len(completions)
"""


def test_rows_golds_and_rewards_are_shown(check, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    golds = ["1", r"\frac{1}{2}", *["3"] * 28, UNREADABLE]
    assert check(golds, LEARNER_REWARDS=f"accuracy,{tmp_path}/own.py:level") == 0
    said = capsys.readouterr().out
    assert "q.jsonl, row 2: prompt of 4 tokens" in said
    assert r"gold answer: \frac{1}{2}" in said
    assert "columns for rewards: question, answer, level, prompt, solution" in said
    assert "gold answers: 31 checked, 1 cannot be read" in said
    assert f"row 31: it is a sentence without a number or formula: {UNREADABLE}" in said
    assert "warning: 3.2% of the gold answers cannot be read" in said
    assert "reward accuracy: can be used" in said
    assert "reward level: can be used" in said


def test_many_unreadable_golds_are_an_error(check, capsys):
    assert check(["1", "2", UNREADABLE, r"$\frac{1}{2-2}$"], "--json") == 65
    found = json.loads(capsys.readouterr().out)
    assert found["share_unreadable"] == 0.5
    assert [why for _, _, why in found["unreadable"]] == [
        "it is a sentence without a number or formula", "it divides by zero",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("unreadable", "accepted", "code", "words"),
    [
        (1, False, 0, "gold answers: 100 checked, 1 cannot be read"),
        (2, False, 0, "warning: 2.0% of the gold answers"),
        (20, False, 0, "warning: 20.0% of the gold answers"),
        (21, False, 65, "error: 21% of the gold answers cannot be read, over 20%"),
        (21, True, 0, "warning: 21.0% of the gold answers"),
    ],
)
def test_the_shares_decide(unreadable, accepted, code, words):
    plan = [{"contract": {"figures": {"questions": 100}, "rewards": []}}]
    bad = [["q.jsonl, row 1", "x", "there is none"]] * unreadable
    verdict = {"rewards": {}, "golds": 100, "unreadable": bad, "rows": []}
    result = Check(accept_unreadable_golds=accepted).joined(plan, verdict)
    assert result.exit_code == code
    assert words in result.text
    assert ("and 11 more" in result.text) == (unreadable == 21)


def test_a_missing_column_of_an_own_reward_is_told(check, tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    assert check(["1", "2"], LEARNER_REWARDS=f"{tmp_path}/own.py:missing") == 78
    said = capsys.readouterr().out
    assert "reward missing: ConfigError: reward missing requires difficulty" in said
    assert "no built-in reward needs them" in said


def test_wrong_settings_and_data_are_told_in_the_words_of_a_run(check, capfd):
    assert check(["1", ""]) == 65
    assert "q.jsonl, row 2: answer is ''; expected the gold answer" in capfd.readouterr().err
    assert check(["1"], LEARNER_MAX_STEPS="many") == 78
    assert "LEARNER_MAX_STEPS: Input should be a valid integer" in capfd.readouterr().err


@pytest.mark.parametrize("flags", [["--rows", "3"], ["--json"], ["--dry-run", "--rows", "3"]])
def test_flags_of_the_preview_train_nothing(flags, capfd):
    assert execute_command(Learner, "learner", flags) == 78
    assert "--rows belongs to --dry-run --json" in capfd.readouterr().err


def test_other_lines_are_refused(monkeypatch, capfd):
    monkeypatch.setattr("sys.stdin", io.StringIO("no JSON"))
    assert execute_command(Rewarder, "rewarder", ["--check"]) == 78
    assert "use `penstock check`" in capfd.readouterr().err
