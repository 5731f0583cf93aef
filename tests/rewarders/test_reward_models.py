"""Reward models: the numbers of transformers, in a process that may hang, crash or lack the model."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ConfigError, ContractMismatch, ServerUnavailable
from penstock.common.sandbox import frames
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import ScoredGroup
from penstock.learner.data.reward_specs import resolve_rewards
from penstock.rewarders import model_process, reward_models
from penstock.rewarders.scoring import make_scorer
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool
from tests.helpers import wait_until
from tests.rewarders.stand_ins import RewarderThread, RunUnderTest, make_contract, make_group
from tests.tiny_tokenizer import LETTERS, save_tokenizer

TEXTS = ("4", "the 4 is 4 and 4", "5", "no", "a 4", "12+3=15 a b c d e f g h")
SETTINGS = RewarderSettings(
    workers=1, timeout_s=10.0, memory_gib=1, reward_model_batch_size=4, reward_model_timeout_s=300.0
)


def save_reward_model(folder: Path, seed: int, outputs: int = 1) -> Path:
    """A tiny classifier with random weights, and a chat template if the seed is odd."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        num_labels=outputs, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder, talks=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["@"])  # beyond the embeddings, so that the model fails for it
    if seed % 2:
        tokenizer.chat_template = "{% for m in messages %}{{ m.role[:1] }}-{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def test_the_text_of_a_reset_belongs_to_the_question() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Guess. "}]
    said = [{"role": "assistant", "content": "5"}]
    arguments = {"prompts": [prompt], "completions": ["5"]}
    reset = [{"role": "user", "content": "1 to 9"}]
    (talk,) = reward_models.conversations_of(arguments | {"transcripts": [[*reset, *said]]})
    assert talk == [prompt[0], {"role": "user", "content": "Guess. 1 to 9"}, *said]
    (talk,) = reward_models.conversations_of(arguments | {"transcripts": [said]})
    assert talk == [*prompt, *said]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: save_reward_model(base / name, seed) for seed, name in enumerate(("plain", "chat"))}


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(SETTINGS) as pool:
        yield pool


def contract_of(folder: Path, *rewards: str) -> Contract:
    specs = resolve_rewards(LearnerSettings(rewards=rewards))
    return replace(make_contract(folder, {}), rewards=specs, filter_zero_std=False)


def by_transformers(folder: Path, prompt: str, completion: str) -> float:
    """The model's number for one conversation alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = prompt + completion
    if tokenizer.chat_template:
        text = f"u-{prompt}a-{completion}"
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits)


def test_the_rewards_are_the_numbers_of_transformers(pool, folder, models) -> None:
    contract = contract_of(folder, *(f"model:{name}={path}" for name, path in models.items()), "length")
    outcome = make_scorer(contract, pool, "rewarder-1").score_group(
        make_group(contract, "train:0", *TEXTS)
    )
    assert isinstance(outcome, ScoredGroup)
    assert list(outcome.rewards) == ["plain", "chat", "length"]
    for name, path in models.items():
        expected = [by_transformers(path, "Q?", text) for text in TEXTS]
        assert outcome.rewards[name] == pytest.approx(expected, abs=1e-5)
        assert len({round(value, 4) for value in expected}) == len(TEXTS)


def test_a_conversation_that_a_model_fails_for_is_a_failure_of_its_own(pool, folder, models) -> None:
    contract = contract_of(folder, f"model:plain={models['plain']}")
    scorer = make_scorer(contract, pool, "rewarder-1")
    too_long = "72 tokens, and the reward model takes at most 64"
    for text, words in (("4" * 70, too_long), ("@", "IndexError")):
        outcome = scorer.score_group(make_group(contract, "train:0", "4", text, "5"))
        assert isinstance(outcome, ScoredGroup)
        assert outcome.rewards["plain"][1] is None
        assert words in outcome.failures[1]
        assert outcome.failures[0] == outcome.failures[2] == ""


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ raise_exception('no 9') if '9' in messages[-1].content }}a", "no 9"),
     ("{{ 'a' * (10**10 if '9' in messages[-1].content else 1) }}", "MemoryError")],
)  # fmt: skip
def test_a_template_that_fails_costs_the_completion_and_not_the_model(
    template: str, words: str, pool, folder, models, tmp_path
) -> None:
    shutil.copytree(models["chat"], tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text(template)
    contract = contract_of(folder, f"model:own={tmp_path / 'own'}")
    scorer = make_scorer(contract, pool, "rewarder-1")
    (model,) = [one for key, one in pool._models.items() if str(tmp_path) in key[0]]
    pid = model._process.pid
    outcome = scorer.score_group(make_group(contract, "train:0", "4", "9", "5"))
    assert isinstance(outcome, ScoredGroup)
    assert words in outcome.failures[1]
    assert outcome.failures[0] == outcome.failures[2] == ""
    assert model._process.pid == pid


def test_a_model_that_was_killed_or_hangs_is_started_again(pool, folder, models) -> None:
    contract = contract_of(folder, f"model:plain={models['plain']}")
    scorer = make_scorer(contract, pool, "rewarder-1")
    (model,) = [one for key, one in pool._models.items() if str(models["plain"]) in key[0]]
    os.kill(model._process.pid, signal.SIGKILL)
    wait_until(lambda: model._process.poll() is not None, "the model's end")
    group = make_group(contract, "train:0", "4", "5")
    assert isinstance(scorer.score_group(group), ScoredGroup)

    os.kill(model._process.pid, signal.SIGSTOP)
    pool._rewarder_settings = model._settings = SETTINGS.model_copy(
        update={"reward_model_timeout_s": 0.2}
    )
    with pytest.raises(ScoringFailed, match=r"took more than 0\.2 s \(REWARDER_REWARD_MODEL"):
        scorer.score_group(group)
    pool._rewarder_settings = model._settings = SETTINGS
    assert isinstance(scorer.score_group(group), ScoredGroup), "the next call starts the model again"


def test_what_cannot_be_used_is_named_at_the_start(pool, folder, models, tmp_path, monkeypatch) -> None:
    two = save_reward_model(tmp_path / "two", 0, outputs=2)
    contract = contract_of(folder, f"model:two={two}")
    with pytest.raises(ContractMismatch, match=r"two cannot be used here: .* 2 outputs, expected"):
        make_scorer(contract, pool, "rewarder-1")
    contract = contract_of(folder, f"model:plain={models['plain']}")
    (spec,) = contract.rewards
    other = replace(contract, rewards=(replace(spec, digest="ff"),))
    with pytest.raises(ContractMismatch, match="are not the learner's: copy"):
        make_scorer(other, pool, "rewarder-1")
    gone = replace(spec, options={"model": str(tmp_path / "gone")})
    with pytest.raises(ContractMismatch, match="there is no folder"):
        make_scorer(replace(contract, rewards=(gone,)), pool, "rewarder-1")
    with pytest.raises(ConfigError, match="neither a folder here nor a model of the hub"):
        resolve_rewards(LearnerSettings(rewards=[f"model:gone={tmp_path}/gone"]))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # vLLM's engine sets it, in the same process of tests
    away = replace(spec, options={"model": "org/model", "revision": "main"})
    with pytest.raises(ServerUnavailable, match="LocalEntryNotFound"):  # no mistake: it is started again
        make_scorer(replace(contract, rewards=(away,)), pool, "rewarder-1")


def test_settings_name_the_mistakes() -> None:
    for wrong in ("model:accuracy=x", "model:=x", "model:a b=x", "model:a="):
        with pytest.raises(ValueError, match="expected model:NAME=FOLDER, model:NAME=ID or"):
            LearnerSettings(rewards=[wrong])
    made = LearnerSettings(rewards=["model:one=a/b:c", "accuracy", "model:two=x"])
    assert made.reward_names == ["one", "accuracy", "two"]


def test_a_process_whose_rewarder_is_gone_ends_without_an_error(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(frames.pack_request({"model": str(tmp_path / "gone")}))
    ours.close()
    with theirs:
        model_process.serve(theirs)


def test_the_model_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "WANDB_API_KEY", "MY_PASSWD", "CREDENTIALS", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    found = reward_models._environment()
    assert [name for name, value in found.items() if value == "secret"] == ["HF_TOKEN"]


def test_a_rewarder_scores_by_a_model(
    connection: Connection, keys: Keys, queue_server: LocalServer, run_name: str, folder, models
) -> None:
    run = RunUnderTest(connection, keys, contract_of(folder, f"model:plain={models['plain']}"))
    run.set_up()
    run.hand_in("train:0", "4", "the 4")
    with RewarderThread(queue_server.url, run_name):
        (outcome,) = run.outcomes("train", 1)
    assert isinstance(outcome, ScoredGroup)
    assert outcome.rewards["plain"][0] == pytest.approx(by_transformers(models["plain"], "Q?", "4"))
