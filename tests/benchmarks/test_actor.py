"""The benchmark of the actor: its run without a learner, and what it counts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import actor
from penstock.common.broker.local_server import LocalServer
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.reward_spec import RewardSpec
from penstock.deploy.demo.tiny_llama import make_model, make_tokenizer, save_checkpoint
from tests.fake_engine import FakeEngine


def test_a_round_gives_each_ticket_a_group_and_follows_new_weights(
    queue_server: LocalServer, tmp_path: Path, monkeypatch: Any
) -> None:
    tokenizer = make_tokenizer()
    save_checkpoint(make_model(tokenizer), tokenizer, tmp_path / "model")
    contract = Contract(
        str(tmp_path / "model"), hash_tokenizer(tmp_path / "model"), "float32", 16,
        (RewardSpec("accuracy"),), True, groups_per_step=30, credit=30,
    )  # fmt: skip
    prompts = [np.array([4, 5, 6], dtype="<i4")] * 30
    setting = actor.Setting(tmp_path / "model", prompts, 5, contract)
    monkeypatch.setattr(actor, "UPDATE_EVERY_S", 0.2)
    engine = FakeEngine(slots=16, token_delay_s=0.02)
    tokens = []
    count = actor.HandMadeRun.tokens

    def keep(run: actor.HandMadeRun) -> int:
        tokens.append(count(run))
        return tokens[-1]

    monkeypatch.setattr(actor.HandMadeRun, "tokens", keep)
    rate = asyncio.run(actor.actor_rate(cast(Any, engine), queue_server, tmp_path, setting, number=3))
    assert rate > 0
    assert 30 * 8 <= tokens[0] <= 30 * 8 * 5
    steps = [version.step for version in engine.taken]
    assert steps[0] == 3000
    assert len(steps) > 1
