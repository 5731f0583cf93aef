"""`rewarder --check`: rewards are loaded in the sandbox, and gold answers are read there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import pytest

from penstock.common.config.settings import RewarderSettings
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.check import check_lines

SETTINGS = RewarderSettings(workers=1, timeout_s=30, memory_gib=2)
ACCURACY = (RewardSpec("accuracy"),)
OWN = "def own(completions, level):\n    return [1.0] * len(completions)\n"

pytestmark = pytest.mark.usefixtures("shared_nurseries")


def checked(*golds, rewards=ACCURACY, rows=()):
    """What the check finds for gold answers, each with its place."""
    contract = {"figures": {}, "rewards": [asdict(spec) for spec in rewards]}
    lines = [
        {"contract": contract},
        *({"row": row} for row in rows),
        *({"gold": gold} for gold in golds),
    ]
    return check_lines(["a line of a library", *map(json.dumps, lines)], SETTINGS)


def golds(name, *values):
    return [[f"{name}, row {number}", gold] for number, gold in enumerate(values, 1)]


def own(folder, columns):
    path = folder / "own.py"
    path.write_text(OWN)
    digest = hashlib.sha256(OWN.encode()).hexdigest()
    return RewardSpec("own", 0.5, str(path), digest, {"columns": columns, "max_steps": 3})


def test_golds_are_counted_per_data_set():
    found = checked(*golds("a, b.jsonl", "5", "####", r"\boxed{1/0}"), *golds("c.jsonl", *["?"] * 60))
    assert found["data"] == {
        "a, b.jsonl": {
            "golds": 3,
            "unreadable": [
                ["a, b.jsonl, row 2", "####", "empty"],
                ["a, b.jsonl, row 3", r"\boxed{1/0}", "divides by zero"],
            ],
        },
        "c.jsonl": {
            "golds": 60,
            "unreadable": [[f"c.jsonl, row {n}", "?", "has no letter or digit"] for n in range(1, 61)],
        },
    }


def test_a_row_is_shown_as_the_rewards_get_it(tmp_path):
    columns = {"question": "1+1=", "level": 3, "completions": "x", "prompt": "1+1=", "solution": "2"}
    row = {"where": "a.jsonl, row 1", "prompt": "<user>1+1=", "tokens": 6, "columns": columns}
    found = checked(rows=[row], rewards=[RewardSpec("accuracy"), own(tmp_path, ["level"])])
    assert found["rewards"] == {"accuracy": "", "own": ""}
    assert found["rows"] == [
        {
            "columns": {"prompts": "1+1=", "question": "1+1=", "level": 3, "solution": "2"},
            "read": "number 2",
            "why": "",
        }
    ]


def test_without_a_built_in_reward_that_needs_golds_none_is_read(tmp_path):
    row = {"where": "a.jsonl, row 1", "prompt": "1", "tokens": 1, "columns": {"prompt": "1"}}
    found = checked(*golds("a.jsonl", ""), rewards=[own(tmp_path, ["answer"])], rows=[row])
    assert found["data"] == {}
    assert found["rows"] == [{"columns": {"prompts": "1"}, "read": None, "why": ""}]
    assert "own requires level, which is no column" in found["rewards"]["own"]


def test_correctness_needs_a_text_only():
    found = checked(*golds("a.jsonl", "So it is.", "####"), rewards=[RewardSpec("correctness")])
    assert found["data"]["a.jsonl"]["unreadable"] == [["a.jsonl, row 2", "####", "empty"]]


def test_a_gold_that_fails_alone_does_not_hide_the_others():
    found = checked(*golds("a.jsonl", "5", 2**80, "6"))["data"]["a.jsonl"]
    assert found["golds"] == 3
    ((where, _, why),) = found["unreadable"]
    assert where == "a.jsonl, row 2"
    assert "plain data" in why
