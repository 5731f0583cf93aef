"""`penstock check`: the roles as processes, and the judgement on what they found."""

from __future__ import annotations

import io
import json
import re

import pytest

from penstock.common.config.command import execute_command, load
from penstock.common.errors import ConfigError, PenstockError
from penstock.deploy.doctor import check as module
from penstock.deploy.doctor.check import Check
from penstock.learner.__main__ import Learner
from penstock.rewarders.__main__ import Rewarder
from tests.e2e.site import make_model

OWN = """
def level(completions, level, **columns):
    return [1.0] * len(completions)

def missing(completions, difficulty, **columns):
    return [1.0] * len(completions)
"""


def run(*flags):
    return load(Check, "penstock check", list(flags)).execute()


def test_rows_golds_and_rewards_of_real_roles_are_shown(tmp_path, monkeypatch, capsys):
    make_model(tmp_path / "model")
    (tmp_path / "own.py").write_text(OWN)
    golds = {
        "a.jsonl": ["1", r"\frac{1}{2}", *["3"] * 28, "It is what the reader thinks."],
        "b.jsonl": ["1", r"\boxed{\frac{1}{0}}", "3"],
    }
    for name, some in golds.items():
        rows = [{"question": f"{n}+1=", "answer": gold, "level": n} for n, gold in enumerate(some)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    own = tmp_path / "own.py"
    (tmp_path / "my.env").write_text(
        f"LEARNER_MODEL={tmp_path / 'model'}\nLEARNER_DATASET={','.join(golds)}\nREWARDER_WORKERS=1\n"
        "LEARNER_MAX_PROMPT_LENGTH=20\nLEARNER_MAX_COMPLETION_LENGTH=20\n"
        f"LEARNER_REWARDS=accuracy,{own}:level,{own}:missing\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run("--env-file", "my.env", "--rows", "2") == 78
    said = capsys.readouterr().out
    assert f"{'questions':<30}34\n" in said
    assert "a.jsonl, row 2: prompt of 4 tokens\n  1+1=\n" in said
    assert "  gold answer: \\frac{1}{2}\n  read as number \\frac{1}{2}\n" in said
    assert "rewards get: prompts=1+1=, question=1+1=, answer=\\frac{1}{2}, level=1, solution=" in said
    assert "warning: a.jsonl: 1 of 31 gold answers cannot be read (3.2%)\n" in said
    assert "a.jsonl, row 31: a sentence: It is what the reader thinks.\n" in said
    assert "error: b.jsonl: 1 of 3 gold answers cannot be read (33.3%)\n" in said
    assert "b.jsonl, row 2: divides by zero: \\boxed{\\frac{1}{0}}\n" in said
    assert re.search(r"reward accuracy: can be used, loaded in \d+\.\d s\n", said)
    assert re.search(
        r"  a.jsonl, row 3: gold 1, garbage 0 \(\d+\.\d\d s\)\nreward level: can be used", said
    )
    assert "a.jsonl, row 3: prompt" not in said, "three rows are tried, two were to be shown"
    assert re.search(r"gold 1, garbage 1 .*\n  note: the gold answer gets no more than garbage", said)
    assert "reward missing: ConfigError: reward missing requires difficulty" in said


@pytest.mark.parametrize(
    ("unreadable", "accepted", "code", "words"),
    [
        (1, False, 0, "\nd.jsonl: 1 of 100 gold answers cannot be read"),
        (2, False, 0, "\nwarning: d.jsonl: 2 of 100"),
        (20, False, 0, "\nwarning: d.jsonl: 20 of 100"),
        (21, False, 65, "\nerror: d.jsonl: 21 of 100 gold answers cannot be read (21.0%)"),
        (21, True, 0, "\nwarning: d.jsonl: 21 of 100"),
        (100, True, 0, "\nwarning: d.jsonl: 100 of 100"),
    ],
)
def test_the_share_of_each_data_set_decides(unreadable, accepted, code, words):
    plan = [{"contract": {"figures": {"questions": 1100}, "rewards": []}}]
    bad = [["d.jsonl, row 1", "x", "empty"]] * unreadable
    data = {"c.jsonl": {"golds": 1000, "unreadable": []}, "d.jsonl": {"golds": 100, "unreadable": bad}}
    verdict = {"rewards": {}, "trials": {}, "data": data, "rows": []}
    result = Check(accept_unreadable_golds=accepted).joined(plan, verdict)
    assert result.exit_code == code
    assert words in result.text
    assert (f"and {unreadable - 10} more" in result.text) == (unreadable > 10)
    assert ("accept this with --accept-unreadable-golds" in result.text) == (code == 65)


def test_without_golds_it_is_said_that_none_is_needed():
    plan = [{"contract": {"figures": {}, "rewards": []}}]
    result = Check().joined(plan, {"rewards": {}, "trials": {}, "data": {}, "rows": []})
    assert "no built-in reward needs them" in result.text
    assert result.exit_code == 0


def test_the_mistakes_of_all_roles_are_named_at_once(monkeypatch):
    for name in ("RUN_LEASE_S", "LEARNER_MAX_STEPS", "REWARDER_WORKERS", "ACTOR_MAX_NUM_SEQS"):
        monkeypatch.setenv(name, "many")
    with pytest.raises(ConfigError) as found:
        run()
    names = [line.partition(":")[0] for line in str(found.value).splitlines()]
    assert sorted(names) == [
        "ACTOR_MAX_NUM_SEQS",
        "LEARNER_MAX_STEPS",
        "REWARDER_WORKERS",
        "RUN_LEASE_S",
    ]


def test_all_that_is_not_there_is_named_at_once(monkeypatch):
    absent = {"MODEL": "./no", "DATASET": "a.csv#5", "REWARDS": "r.py:f", "LOSS": "l.py:f"}
    for name, value in absent.items():
        monkeypatch.setenv(f"LEARNER_{name}", value)
    with pytest.raises(ConfigError) as found:
        run()
    assert re.findall("=(.*): no such", str(found.value)) == [*absent.values()]


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Takes the code of a learner and a rewarder, which are then started in place of the real ones."""
    for name, value in {"PYTHONPATH": tmp_path, "LEARNER_MODEL": "m", "LEARNER_DATASET": "d"}.items():
        monkeypatch.setenv(name, str(value))

    def use(**roles):
        for role, code in roles.items():
            (tmp_path / f"other_{role}.py").write_text(code)
            monkeypatch.setitem(module._MODULES, role, f"other_{role}")
        return tmp_path

    return use


@pytest.mark.parametrize(
    ("learner", "rewarder", "code"), [("exit(65)", "open('started', 'w')", 65), ("", "exit(78)", 78)]
)
def test_a_role_that_fails_gives_its_exit_code(stand_ins, monkeypatch, learner, rewarder, code):
    folder = stand_ins(learner=learner, rewarder=rewarder)
    monkeypatch.chdir(folder)
    assert run() == code
    assert not (folder / "started").exists()


def test_a_role_that_is_killed_is_named(stand_ins):
    stand_ins(learner="import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(PenstockError, match="`learner --dry-run --json --rows 3`: Killed by SIGKILL"):
        run()


@pytest.mark.parametrize("flags", [["--rows", "3"], ["--json"], ["--dry-run", "--rows", "3"]])
def test_flags_of_the_preview_train_nothing(flags, capfd):
    assert execute_command(Learner, "learner", flags) == 78
    assert "--rows belongs to --dry-run --json" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("role", "flag"), [(Learner, "--rows"), (Learner, "--json"), (Rewarder, "--check")]
)
def test_the_help_of_a_role_names_the_flags_of_a_check(role, flag, capsys):
    assert execute_command(role, role.role, ["--help"]) == 0
    assert flag in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "at_a_terminal"),
    [("no JSON", False), ('{"row": {}}', False), ('{"other": 1}', False), ("", True)],
)
def test_other_input_is_refused(monkeypatch, capfd, text, at_a_terminal):
    given = io.StringIO(text)
    monkeypatch.setattr(given, "isatty", lambda: at_a_terminal)
    monkeypatch.setattr("sys.stdin", given)
    assert execute_command(Rewarder, "rewarder", ["--check"]) == 78
    assert "use `penstock check`" in capfd.readouterr().err
