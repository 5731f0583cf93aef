"""Code of a model folder runs only if its own role's variable says so, and nobody is asked."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from penstock.actors.vllm_engine import engine_arguments, read_stop_ids
from penstock.common.config.settings import ActorSettings
from penstock.common.errors import ConfigError
from penstock.common.wire.contract import Contract
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.data.plan import read_model
from penstock.learner.policy.model import load_model
from penstock.learner.resume import settings_of
from tests.helpers import needs_vllm
from tests.learner.builders import make_settings
from tests.size import ROOT, product_files

LEARNERS = "settings.trust_remote_code"
ASKED = {
    "learner/policy/policy.py": {LEARNERS},
    "learner/policy/model.py": {LEARNERS},
    "learner/data/plan.py": {"trust_remote_code"},  # an argument of read_model, False by default
}
"""The files whose calls may trust code, and the only value that they may pass."""


def calls_without_a_word() -> list[str]:
    """The calls of the product that load a model, and pass another trust_remote_code than allowed."""
    files = [*product_files(), *(ROOT / "benchmarks").glob("*.py")]
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
        if {ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"}
        != ASKED.get(str(path.relative_to(ROOT)), {"False"})
    ]


def test_every_call_that_loads_a_model_trusts_no_code_or_asks_its_own_variable():
    assert calls_without_a_word() == []
    assert signature(read_model).parameters["trust_remote_code"].default is False


def test_code_is_trusted_nowhere_by_default_and_never_by_the_contract():
    assert make_settings().trust_remote_code is False
    assert ActorSettings().trust_remote_code is False
    assert not [field.name for field in fields(Contract) if "trust" in field.name]


def test_a_replay_trusts_no_code_because_the_journal_says_so():
    recorded = make_settings(trust_remote_code=True).model_dump(mode="json")
    assert settings_of(recorded, {}).trust_remote_code is False
    assert settings_of(recorded, {"trust_remote_code": "true"}).trust_remote_code is True


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize("trusted", [False, True])
def test_the_actors_own_variable_decides_for_the_engine(trusted):
    contract = Contract("model", "", "float32", 384, (RewardSpec("accuracy"),), True, 4, 8)
    given = engine_arguments(ActorSettings(trust_remote_code=trusted), contract, Path("model"))
    assert given["trust_remote_code"] is trusted


@pytest.fixture
def folder(tmp_path, model_folder):
    """A model folder whose configuration names code that leaves a mark."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    mark = f"open({str(tmp_path / 'mark')!r}, 'w')\n"
    (folder / "hostile.py").write_text(mark + "class Hostile: pass\n")
    return folder


def rewrite(folder, name: str, **changes) -> None:
    found = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(found | changes))


def test_code_of_a_model_folder_is_refused_and_nobody_is_asked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked on the terminal"))
    monkeypatch.setattr(sys, "stdin", None)
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    auto_map = dict.fromkeys(names, "hostile.Hostile")
    rewrite(folder, "config.json", auto_map=auto_map, model_type="hostile")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(folder)
    with pytest.raises(ConfigError, match="expected a causal language model"):
        load_model(folder, make_settings())
    assert not (tmp_path / "mark").exists()


HARMLESS = """
from transformers import LlamaConfig, LlamaForCausalLM
open({mark!r}, "w")


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_the_user_trusts_is_run_and_stays_with_what_is_exported(folder, tmp_path):
    """In a process of its own, because transformers keeps the folder of such code from its import on."""
    (folder / "harmless.py").write_text(HARMLESS.format(mark=str(tmp_path / "mark")))
    names = {"AutoConfig": "harmless.OwnConfig", "AutoModelForCausalLM": "harmless.OwnModel"}
    rewrite(folder, "config.json", auto_map=names, model_type="own")
    with pytest.raises(ConfigError, match="LEARNER_TRUST_REMOTE_CODE=true"):
        read_model(folder)
    assert not (tmp_path / "mark").exists()
    home = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.learner.trusting", str(folder), str(tmp_path / "exported")]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT, env=os.environ | home)
    assert (tmp_path / "mark").exists()
    assert (tmp_path / "modules").is_dir()
    assert (tmp_path / "exported" / "harmless.py").is_file()


class Mark:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_weights_are_not_loaded(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Mark(str(tmp_path / "mark"))))
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(folder, make_settings())
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", "{", '{"model_type": 7}'])
def test_a_damaged_file_of_a_model_folder_is_a_clear_error_or_not_needed(folder, name, content):
    (folder / name).write_text(content)
    is_not_needed = name == "tokenizer_config.json" and content.endswith("}")
    refused = pytest.raises(ConfigError, match=r"LEARNER_MODEL=.*: cannot be read")
    with contextlib.nullcontext() if is_not_needed else refused:
        read_model(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", '{"eos_token_id": "a"}', "\xff"])
def test_end_tokens_of_a_damaged_configuration_are_a_clear_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json: damaged"):
        read_stop_ids(tmp_path)
