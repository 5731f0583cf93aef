"""Every recipe resolves, and trains a tiny stand-in for its model for two steps."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dotenv import dotenv_values

import penstock.actors.loop
from penstock.common.config.command import execute_command, load
from penstock.common.config.role_command import ActorCommand, LearnerCommand
from penstock.deploy import devices
from penstock.deploy.up import Up
from penstock.learner.__main__ import main
from penstock.learner.start import run_learner
from tests.actors.fake_actor import make_engine
from tests.e2e.forked import Forked
from tests.e2e.site import FAKE_PROCFILE, ROOT, Site, make_model

RECIPES = sorted((ROOT / "deploy" / "recipes").glob("*.env"))
STAND_IN = {
    "LEARNER_MAX_PROMPT_LENGTH": "900",
    "LEARNER_MAX_COMPLETION_LENGTH": "8",
    "LEARNER_COSINE_MAX_LEN": "0",
    "LEARNER_SOFT_CACHE_LENGTH": "4",
    "LEARNER_REPORT_TO": "",
    "LEARNER_EVAL_SAMPLES": "4",
}
PAGE = ROOT / "docs" / "coming-from.md"


def write_numina(path: Path, count: int = 400) -> Path:
    """Rows in the columns of NuminaMath-TIR, Orz-57K and GSM8K, as a recipe expects them."""
    rows = [
        {
            "0": {"from": "human", "value": f"{n}+1="},
            "1": {"from": "assistant", "ground_truth": {"value": str(n + 1)}},
            "problem": f"{n}+1=",
            "solution": rf"It is \boxed{{{n + 1}}}.",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def variables_for(recipe: Path, folder: Path) -> dict[str, str]:
    """What stands in for the recipe's model and data sets."""
    found = dotenv_values(recipe)
    changes = dict(STAND_IN)
    data = str(write_numina(folder / "rows.jsonl"))
    for name in ("LEARNER_DATASET", "LEARNER_EVAL_DATASET"):
        if found.get(name) or name == "LEARNER_DATASET":
            changes[name] = data
    return changes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_and_says_how_many_steps_it_makes(
    recipe, model, tmp_path, monkeypatch, capsys
):
    variables = variables_for(recipe, tmp_path) | {"LEARNER_MODEL": str(model)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["learner", "--dry-run", "--env-file", str(recipe)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert re.search(r"steps\W+[1-9]", said.out), said.out


def claims_of(recipe: Path) -> list[tuple[list[str], int, str]]:
    """Of each `penstock up` in a recipe's comment: its flags, and the GPUs and processes below."""
    text = re.sub(r" \\\n#\s+", " ", recipe.read_text())
    form = r"penstock up (.*)\n#\n# With (\d+) GPUs? this starts:\n((?:#   \S+ +\S+\n)+)"
    found = re.findall(form, text)
    return [(flags.split(), int(count), lines.replace("#   ", "")) for flags, count, lines in found]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_comment_says_what_would_be_started(recipe, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text, claims = recipe.read_text(), claims_of(recipe)
    name = f"deploy/recipes/{recipe.name}"
    assert set(re.findall(r"--env-file (\S+\.env)", text)) == {name}
    assert text.count("this starts:") == len(claims)
    assert claims or "cpu" in text.lower() or "arithmetic" in recipe.stem
    for flags, count, lines in claims:
        monkeypatch.setattr(devices, "visible_gpus", lambda _, n=count: tuple(map(str, range(n))))
        assert execute_command(Up, "penstock up", [*flags, "--dry-run"]) == 0
        _, *processes = capsys.readouterr().out.splitlines()
        assert [one.split()[:2] for one in processes] == [one.split() for one in lines.splitlines()]


def test_there_are_recipes_for_one_gpu_for_eight_and_for_several_machines():
    claims = [claim for recipe in RECIPES for claim in claims_of(recipe)]
    assert {count for _, count, _ in claims} == {1, 2, 8}
    assert any("--listen" in flags for flags, _, _ in claims)
    assert any("--only" in flags for flags, _, _ in claims)


def training_variables(recipe: Path, folder: Path, model: Path) -> dict[str, str]:
    """All but the model, the data, the lengths and the number of steps is the recipe's."""
    kept = dotenv_values(recipe)
    return variables_for(recipe, folder) | {
        "LEARNER_MODEL": str(model),
        "LEARNER_MAX_STEPS": "2",
        "LEARNER_GROUPS_PER_STEP": "2",
        "LEARNER_NUM_GENERATIONS": "4",
        "LEARNER_FILTER_ZERO_STD": "false",
        "LEARNER_MAX_LOGP_DIFFERENCE": "0",  # the fake engine's log-probabilities are its own
        "LEARNER_EVAL_HOLDOUT": "4" if "LEARNER_EVAL_HOLDOUT" in kept else "0",
        "REWARDER_WORKERS": kept.get("REWARDER_WORKERS") or "1",
        "RUN_NAME": "e2e",
        "RUN_DIR": str(folder / "runs"),
        "RUN_LEASE_S": "3",
    }


def assert_two_steps(run_folder: Path) -> None:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.e2e
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_a_stand_in(recipe, model, tmp_path, queue_server, monkeypatch):
    """In this process, with the actor as a thread: the imports of 13 learners take over a minute.

    The rewarder is a process of its own, because for a moment it empties the environment.
    """
    variables = training_variables(recipe, tmp_path, model)
    name = f"recipe-{recipe.stem}"  # the queue server is that of all tests
    for variable, value in (variables | {"RUN_NAME": name, "REDIS_URL": queue_server.url}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(ROOT)
    flags = ["--env-file", str(recipe)]
    learner, actor = (load(kind, kind.role, flags) for kind in (LearnerCommand, ActorCommand))
    rewarder = Forked("penstock.rewarders", flags, ROOT, os.environ)
    stopping = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        acting = threads.submit(penstock.actors.loop.run, actor, stopping, make_engine)
        rewarding = threads.submit(rewarder.wait, 600)
        for role in (acting, rewarding):
            role.add_done_callback(lambda _: stopping.set())  # one that fails ends all
        try:
            run_learner(learner, stopping)
            acting.result()
            assert rewarding.result() == 0
        finally:
            stopping.set()
            rewarder.kill()
    assert_two_steps(tmp_path / "runs" / name)


@pytest.mark.e2e
def test_penstock_up_trains_a_recipe(model, tmp_path):
    """The recipe with settings of all roles, read from its file and handed to real processes."""
    recipe = ROOT / "deploy" / "recipes" / "smollm2-gsm8k-cpu.env"
    site = Site(tmp_path, FAKE_PROCFILE)
    site.variables = training_variables(recipe, tmp_path, model)
    site.start("--env-file", str(recipe))
    assert site.wait(600) == 0, "\n".join(site.lines[-30:])
    assert_two_steps(site.run_folder)


def test_the_page_names_tests_and_recipes_that_exist():
    page = PAGE.read_text()
    features = page[
        page.index("\n## ms-swift's GRPO guide") :
    ]  # the table before compares names with TRL's
    rows = [line for line in features.splitlines() if line.startswith("| ") and "---" not in line]
    shown = [row.rstrip(" |").rpartition("| ")[2] for row in rows]
    assert len(rows) > 60
    for proofs in shown:
        for proof in proofs.split(", "):
            assert proof in ("open", "shown by") or (ROOT / proof).is_file(), proof
    named = set(re.findall(r"deploy/recipes/[\w.-]+\.env", page))
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_every_variable_the_page_names_is_one():
    from penstock.common.config.variables import variables

    names = set(re.findall(r"\b((?:ACTOR|REWARDER|RUN)_[A-Z_]+[A-Z])\b", PAGE.read_text()))
    assert names
    assert names <= set(variables())
