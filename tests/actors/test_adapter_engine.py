"""Real vLLM on the CPU with LoRA adapters, against transformers with the merged weights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.actors.engine import WeightsRejected, hash_weights
from penstock.actors.weights import probing
from penstock.common.errors import EngineFailed
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.messages import ADAPTER_FILE, Probe, Rollout, Version, Weights
from penstock.learner.policy.lora import add_adapter, merge_adapter, write_adapter
from tests.actors.live_engine import PROMPTS, SAMPLING, Live
from tests.actors.tiny_llama import greedy, load, make_model, save_model, teacher_forced, train
from tests.helpers import needs_vllm
from tests.learner.builders import make_settings

pytestmark = [pytest.mark.engine, needs_vllm]

SPEC = AdapterSpec(4, 32, ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"))
GREEDY = replace(SAMPLING, temperature=0.0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `base`, and the adapters `one` and `two` beside `one-merged` and so on."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_model(tied=False)
    train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), 10)
    save_model(model, folder / "base", "float32")
    settings = make_settings(lora_rank=SPEC.rank, lora_alpha=SPEC.alpha)
    adapted = add_adapter(model, settings)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for name, rate in (("one", 1e-2), ("two", 0.3)):  # the second learns to answer something else
        train(adapted, torch.optim.AdamW(trained, lr=rate), 5)
        state = {name: value.detach() for name, value in model.named_parameters()}
        write_adapter(adapted, state, folder / name)
        merged = load(folder / "base")
        merged.load_state_dict(merge_adapter(state, SPEC.alpha / SPEC.rank), strict=False)
        merged.save_pretrained(folder / f"{name}-merged")
    return folder


@pytest.fixture(scope="module")
def live(site: Path) -> Iterator[Live]:
    """A started engine on the base model, for adapters."""
    live = Live(site / "base", site / "base", "float32", SPEC)
    yield live
    live.stop()


def difference(live: Live, model: Path) -> float:
    """The mean of |engine - transformers| log-probability of four texts, scored at a time."""
    texts = [np.concatenate([prompt, PROMPTS[5]])[: 10 - i] for i, prompt in enumerate(PROMPTS[:4])]
    expected = teacher_forced(load(model), [(text[:1], text[1:]) for text in texts], 1.0)
    probes = [Probe(text, values) for text, values in zip(texts, expected, strict=True)]
    return live.call(probing.mean_difference(live.engine, probes))


def test_greedy_answers_are_those_of_the_merged_model(live: Live, site: Path) -> None:
    """Each version takes the place of the one before, also with cached keys and values of it."""
    answers = {}
    for name in ("one", "two", "one"):
        live.take(site / name)
        groups = live.sample(PROMPTS, GREEDY, count=1)
        answers[name] = [group[0].token_ids.tolist() for group in groups]
        assert answers[name] == greedy(load(site / f"{name}-merged"), PROMPTS, 40)
    assert answers["one"] != answers["two"]


def test_the_engine_computes_what_the_learner_does(live: Live, site: Path) -> None:
    live.take(site / "one")
    assert difference(live, site / "one-merged") < 1e-4
    assert difference(live, site / "base") > 0.1
    (group,) = live.sample(PROMPTS[:1])
    (expected,) = teacher_forced(load(site / "one-merged"), [(PROMPTS[0], group[0].token_ids)], 1.0)
    assert np.abs(group[0].logprobs - expected).mean() < 1e-4


def test_an_adapter_is_replaced_while_requests_are_in_flight(live: Live, site: Path) -> None:
    old = live.take(site / "one")
    weights = live.next_weights(site / "two")

    async def change() -> list[tuple[Rollout, ...]]:
        sampling = replace(SAMPLING, max_tokens=300, stop=("no such text",))
        running = asyncio.create_task(live.sample_all(PROMPTS[:8], sampling, 4))
        while live.engine.room() == 128 + 8 or not live.engine.tokens_generated():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await live.engine.take_weights(weights)
        return await running

    rollouts = [rollout for group in live.call(change()) for rollout in group]
    spans = {tuple(span.version for span in rollout.spans) for rollout in rollouts}
    assert (old, weights.version) in spans
    for prompt, group in zip(PROMPTS[:8], live.sample(PROMPTS[:8], GREEDY, 1), strict=True):
        assert group[0].token_ids.tolist() == greedy(load(site / "two-merged"), [prompt], 40)[0]


def test_whole_weights_are_refused(live: Live, site: Path) -> None:
    version = live.take(site / "one")
    merged = site / "one-merged"
    whole = Weights(Version(1, 99), str(merged), hash_weights(merged), "")
    with pytest.raises(
        WeightsRejected, match=r"whole weights, and this engine was started for AdapterSpec\(rank=4"
    ):
        live.call(live.engine.take_weights(whole))
    other = replace(live.next_weights(site / "two"), adapter=replace(SPEC, alpha=16))
    with pytest.raises(WeightsRejected, match="alpha=16"):
        live.call(live.engine.take_weights(other))
    assert live.engine.version == version


def test_adapters_that_are_wrong_for_the_model_end_the_engine_or_are_found(
    live: Live, site: Path, tmp_path: Path
) -> None:
    """Two layers that have changed places pass every hash. vLLM leaves out what it has no place for."""
    state = load_file(site / "two" / ADAPTER_FILE)
    other = {"0": "1", "1": "0"}
    names = {name: re.sub(r"(?<=layers\.)\d", lambda digit: other[digit[0]], name) for name in state}
    folder = tmp_path / "swapped"
    folder.mkdir()
    save_file({names[name]: value for name, value in state.items()}, folder / ADAPTER_FILE)
    live.take(folder)
    assert difference(live, site / "two-merged") > 0.1
    live.take(site / "two")
    assert difference(live, site / "two-merged") < 1e-4
    less = {name: value for name, value in state.items() if "layers.1.mlp.down_proj" not in name}
    moved = {name.replace(".layers.", ".lm.layers."): value for name, value in state.items()}
    for wrong in (less, moved):
        save_file(wrong, folder / ADAPTER_FILE)
        with pytest.raises(EngineFailed, match=r"no place.*LEARNER_LORA_PUBLISH_MERGED"):
            live.take(folder)
        live.call(live.engine._llm.resume_generation())
    strange = {name.replace("q_proj", "no_such_layer"): value for name, value in state.items()}
    save_file(strange, folder / ADAPTER_FILE)
    with pytest.raises(EngineFailed, match="LEARNER_LORA_PUBLISH_MERGED"):
        live.take(folder)
