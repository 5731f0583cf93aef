"""`penstock try-reward`: the rewards of a file through real roles, and which ones a file has."""

from __future__ import annotations

import json

import pyarrow.parquet
import pytest

from penstock.common.config.command import execute_command
from penstock.common.errors import ConfigError
from penstock.common.text import from_line, to_line
from penstock.deploy.try_reward import TryReward, rewards_in

REWARDS = """
import re

def right(completions, solution, **_):
    return [float(s in c) for c, s in zip(completions, solution)]

def careless(completions, **_):
    return [float(re.search(r"(\\d+)", text).group(1)) for text in completions]

def two_of(a, b):
    return a + b

def _private(completions):
    return 1 / 0
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with rewards and questions, and no model."""
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "REWARDS", "DATASET", "REWARD_WEIGHTS", "METRIC_FOR_BEST_MODEL"):
        monkeypatch.setenv(f"LEARNER_{name}", "")
    others = {"REWARDS": "accuracy", "REWARD_COMPLETIONS": "auto", "DATASET_SPLIT": "train"}
    for name, value in others.items():
        monkeypatch.setenv(f"LEARNER_{name}", value)
    monkeypatch.setenv("REWARDER_WORKERS", "1")
    (tmp_path / "r.py").write_text(REWARDS)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def run(*flags):
    return execute_command(TryReward, "penstock try-reward", flags)


def test_rewards_get_bytes_as_in_a_run(site, capfd):
    code = "def whole(completions, raw, **_):\n    return [float(one == [b'a\\xff']) for one in raw]\n"
    (site / "r.py").write_text(code)
    table = pyarrow.table({"question": ["1+1="], "answer": ["2"], "raw": [[b"a\xff"]]})
    pyarrow.parquet.write_table(table, site / "d.parquet")
    for flags in ([], ["--json"]):
        assert run("r.py", "--dataset", "d.parquet", *flags) == 0
    said = capfd.readouterr().out
    assert "gold 1, garbage 1" in said
    assert '"gold": 1.0' in said


@pytest.mark.parametrize("value", [b"\xff\0", {"\0bytes": 5}, {"\0bytes": "a", "b": [None, b""]}])
def test_a_line_between_roles_keeps_its_value(value):
    assert from_line(to_line({"row": [value]})) == {"row": [value]}


def test_values_times_and_failures_of_a_file_are_shown(site, capfd):
    assert run("r.py", "--dataset", "d.jsonl") == 78
    said = capfd.readouterr().out
    assert "reward right: can be used, loaded in" in said
    assert "  d.jsonl, row 3: gold 1, garbage 0 (" in said
    assert "d.jsonl, row 4" not in said
    failure = "  d.jsonl, row 1: fails on garbage: reward careless: AttributeError: 'NoneType' object"
    assert failure in said
    assert "(r.py, line 8, in careless: `" in said
    assert "reward two_of" not in said, "its parameters are those of no reward"
    assert "left out, of no known form: two_of (r.py:two_of says why)" in said
    assert "_private" not in said
    assert "write FILE:NAME" in said


def test_the_rewards_of_the_variables_are_tried_without_a_file(site, capfd):
    assert run("--dataset", "d.jsonl", "--json") == 0
    verdict = json.loads(capfd.readouterr().out)
    assert verdict["rewards"] == {"accuracy": ""}
    calls = verdict["trials"]["accuracy"]["calls"]
    assert [call["values"] for call in calls] == [{"gold": 1.0, "garbage": 0.0}] * 3


def test_messages_are_given_where_they_are_asked_for(site, capfd):
    (site / "r.py").write_text(
        "def own(completions, **_): return [len(c[0]['content']) for c in completions]"
    )
    assert run("r.py:own", "--dataset", "d.jsonl", "--completions", "messages", "--rows", "1") == 0
    assert "gold 1, garbage 11" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["r.py"], "LEARNER_DATASET is not set"),
        (["none.py", "--dataset", "d.jsonl"], "try-reward none.py: cannot be read"),
        (["r.py:other", "--dataset", "d.jsonl"], "has no other; the module has careless"),
        (["r.py", "--dataset", "d.jsonl", "--rows", "4"], "less than or equal to 3"),
        (["r.py", "--dataset", "d.jsonl", "--completions", "all"], "LEARNER_REWARD_COMPLETIONS"),
    ],
)
def test_mistakes_are_named(site, capfd, flags, words):
    assert run(*flags) == 78
    said = capfd.readouterr()
    assert words in said.out + said.err


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def a(): ...\nasync def b(): ...\nclass C: ...\ndef _d(): ...\nx = 1", ["a", "b", "C"]),
        ("class C: ...\norms['mine'] = C\nother['x'] = C\norms[1] = C", ["mine"]),
        ("if True:\n    def hidden(): ...\ndef a(): ...", ["a"]),
    ],
)
def test_the_rewards_of_a_file_are_read_without_running_it(tmp_path, code, names):
    path = tmp_path / "own.py"
    path.write_text(f"{code}\n1 / 0")
    assert rewards_in(str(path)) == [f"{path}:{name}" for name in names]


@pytest.mark.parametrize(("code", "words"), [("x = 1", "no function or class"), ("def", "line 1: no P")])
def test_a_file_without_rewards_is_refused(tmp_path, code, words):
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=words):
        rewards_in(str(tmp_path / "own.py"))


@pytest.mark.parametrize("asked", ["own.py:one", "pkg.mod.one"])
def test_one_reward_is_taken_as_it_is(asked):
    assert rewards_in(asked) == [asked]
