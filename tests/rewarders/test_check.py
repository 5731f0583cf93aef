"""`rewarder --check`: rewards are loaded in the sandbox, and gold answers are read there."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict

import pytest

from penstock.common.config.settings import RewarderSettings
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.check import GARBAGE, check_lines
from tests.rewarders.test_failures import FAULTY

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


def rows_of(*solutions, **columns):
    """Rows of a data set, None for a solution: without one."""
    found = []
    for number, solution in enumerate(solutions, 1):
        gold = {} if solution is None else {"solution": solution}
        row = {"where": f"a.jsonl, row {number}", "prompt": "Q", "tokens": 1}
        found.append({**row, "columns": {"prompt": "Q?", **gold, **columns}})
    return found


def specs_of(folder, code, *names, **options):
    path = folder / "own.py"
    path.write_text(code)
    digest = hashlib.sha256(code.encode()).hexdigest()
    return [RewardSpec(name, 1.0, str(path), digest, options) for name in names]


def test_each_reward_is_called_on_gold_and_garbage_of_three_rows(tmp_path):
    code = (
        "def right(completions, solution, **_):\n"
        "    return [float(c == s) for c, s in zip(completions, solution)]\n"
        "def state(completions, trainer_state, completion_ids, level, **_):\n"
        "    return [trainer_state.max_steps + len(ids) + l for ids, l in zip(completion_ids, level)]\n"
    )
    rewards = [RewardSpec("acc"), *specs_of(tmp_path, code, "right", "state", max_steps=100)]
    found = checked(rewards=rewards, rows=rows_of("7", "#### 8", "9", "10", level=1000))["trials"]
    assert [call["where"] for call in found["acc"]["calls"]] == [f"a.jsonl, row {n}" for n in (1, 2, 3)]
    assert [call["values"] for call in found["acc"]["calls"]] == [{"gold": 1.0, "garbage": -1.0}] * 3
    assert [call["values"] for call in found["right"]["calls"]] == [{"gold": 1.0, "garbage": 0.0}] * 3
    assert found["state"]["calls"][1]["values"] == {"gold": 1106.0, "garbage": 1100.0 + len(GARBAGE)}
    assert all(call["failures"] == {} and call["seconds"] > 0 for call in found["state"]["calls"])
    assert found["right"]["load_s"] > 0


def test_without_a_gold_answer_garbage_alone_is_tried(tmp_path):
    (spec,) = specs_of(tmp_path, "def own(completions): return [2] * len(completions)\n", "own")
    (call,) = checked(rewards=[spec], rows=rows_of(None))["trials"]["own"]["calls"]
    assert call["values"] == {"garbage": 2.0}


def test_twelve_faulty_rewards_give_file_and_line(tmp_path):
    faults = dict(enumerate(FAULTY))
    code = "def deeper(level): return deeper(level + 1)\n" + "".join(
        f"def own{number}(completions, **_):\n    found = {fault}\n    return [1.0] * len(completions)\n"
        for number, fault in faults.items()
    )
    specs = specs_of(tmp_path, code, *(f"own{number}" for number in faults))
    found = checked(rewards=specs, rows=rows_of("1", "2"))["trials"]
    for number, fault in faults.items():
        (call,) = found[f"own{number}"]["calls"]
        assert call["failures"].keys() <= {"gold", "garbage"}, "one row, each answer alone"
        said = call["failures"]["garbage"]
        assert f"reward own{number}: {FAULTY[fault]}" in said, said
        assert f"own.py, line {3 * number + 3}, in own{number}" in said or "in deeper" in said, said


def test_a_reward_that_cannot_be_loaded_gives_file_and_line_and_is_not_tried(tmp_path):
    code = "class Own:\n  def __init__(self):\n    {}['key']\n  def __call__(self, completions): ...\n"
    found = checked(rewards=specs_of(tmp_path, code, "Own"), rows=rows_of("1"))
    assert re.match(r"KeyError: 'key' \(own.py, line 3, in __init__", found["rewards"]["Own"])
    assert found["trials"] == {}


def test_a_reward_that_hangs_is_called_once(tmp_path):
    specs = specs_of(tmp_path, "def own(completions, **_):\n    while True: pass\n", "own")
    contract = {"figures": {}, "rewards": [asdict(spec) for spec in specs]}
    lines = [{"contract": contract}, *({"row": row} for row in rows_of("1", "2"))]
    settings = RewarderSettings(workers=1, timeout_s=0.5, memory_gib=2)
    (call,) = check_lines(map(json.dumps, lines), settings)["trials"]["own"]["calls"]
    assert "took more than 0.5 s (REWARDER_TIMEOUT_S" in call["failures"]["both"]


def test_rewards_that_compare_a_group_get_both_answers(tmp_path):
    code = "def own(completions, **_):\n    assert len(completions) == 2, 'two'\n    return [1, 2]\n"
    (call,) = checked(rewards=specs_of(tmp_path, code, "own"), rows=rows_of("1"))["trials"]["own"][
        "calls"
    ]
    assert call["values"] == {"gold": 1.0, "garbage": 2.0}


def test_conversations_are_given_where_the_run_has_them(tmp_path):
    code = "def own(transcripts, environment_reward, **_):\n    return [len(t) for t in transcripts]\n"
    specs = [RewardSpec("environment"), *specs_of(tmp_path, code, "own")]
    contract = {"figures": {}, "rewards": [asdict(spec) for spec in specs], "episodes": True}
    lines = [{"contract": contract}, {"row": rows_of("1")[0]}]
    found = check_lines(map(json.dumps, lines), SETTINGS)["trials"]
    assert found["own"]["calls"][0]["values"] == {"gold": 1.0, "garbage": 1.0}
    assert found["environment"]["calls"] == []
