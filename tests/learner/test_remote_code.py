"""A model folder may name code of its own: it is never run, and nobody is asked on a terminal."""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import shutil
import sys

import pytest

from penstock.actors.vllm_engine import read_stop_ids
from penstock.common.errors import ConfigError
from penstock.learner.data.plan import read_model
from penstock.learner.policy.model import load_model
from tests.learner.builders import make_settings
from tests.size import ROOT, product_files


def calls_without_a_word() -> list[str]:
    """The calls of the product that load a model, and do not say trust_remote_code=False."""
    files = [*product_files(), *(ROOT / "benchmarks").glob("*.py")]
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
        if "trust_remote_code=False" not in [ast.unparse(word) for word in node.keywords]
    ]


def test_every_call_that_loads_a_model_says_that_no_code_is_trusted():
    assert calls_without_a_word() == []


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
    with contextlib.suppress(ConfigError):
        read_model(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", '{"eos_token_id": "a"}', "\xff"])
def test_end_tokens_of_a_damaged_configuration_are_a_clear_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json: damaged"):
        read_stop_ids(tmp_path)
