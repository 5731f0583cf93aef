"""Engine and trainer on one model: the same answers, the same log-probabilities.

    python -m tests.e2e.agreement MODEL_FOLDER QUESTIONS.jsonl

loads a model folder (a checkpoint's `model`) in vLLM and with AutoModelForCausalLM. In fp32 on both
sides the greedy answers to 50 questions must be token-identical; at temperatures 1.0 and 0.7 the mean
absolute difference of per-token log-probabilities must be at most 0.0001. In bf16 the difference may be
three times that of the trainer in bf16 from itself in fp32: how much rounding does depends on the model
(0.0045 to 0.0051 for the demo's models of seed 11, whose engine and trainer differ by 0.0064 to 0.0079).
The last comparison is in bf16 with logits in fp32 (LEARNER_CAST_LM_HEAD_TO_FP32), with the same limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.actors.engine import hash_weights
from penstock.actors.vllm_engine import VllmEngine
from penstock.common.config.settings import ActorSettings
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Rollout, Sampling, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.policy.logprobs import make_logprob_head

LIMIT = 1e-4
ROUNDINGS = 3
QUESTIONS, NEW_TOKENS = 50, 32


async def sample(
    folder: Path, dtype: str, fp32_head: bool, prompts: list[np.ndarray], temperatures: list[float]
) -> dict[float, list[Rollout]]:
    """One completion per prompt and temperature, by the engine that actors run."""
    contract = Contract(
        str(folder), "", dtype, 0, (RewardSpec("accuracy"),), True, 1, 1, cast_lm_head_to_fp32=fp32_head
    )
    length = max(map(len, prompts)) + NEW_TOKENS
    engine = VllmEngine(ActorSettings(max_model_len=length, kv_cache_gib=0.5), contract, folder)
    await engine.take_weights(Weights(Version(1, 1), str(folder), hash_weights(folder), ""))
    found = {}
    for temperature in temperatures:
        sampling = Sampling(temperature, 1.0, 0, 0.0, NEW_TOKENS, 7)
        groups = await asyncio.gather(
            *(
                engine.generate(f"{temperature}-{number}", prompt, sampling, 1)
                for number, prompt in enumerate(prompts)
            )
        )
        found[temperature] = [rollouts[0] for rollouts in groups]
    await engine.stop()
    return found


@torch.no_grad()
def logprobs_of(
    model, prompts: list[np.ndarray], rollouts: list[Rollout], temperature: float, fp32_head: bool
) -> np.ndarray:
    """The trainer's log-probabilities of the engine's completions, of all tokens in one array."""
    head = make_logprob_head(model, chunk=128, fp32=fp32_head)
    found = []
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, rollout.token_ids]).astype(np.int64))
        hidden = model.base_model(ids[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        temperatures = torch.full((len(hidden),), temperature)
        found.append(head(hidden, ids[len(prompt) :], temperatures)[0].numpy())
    return np.concatenate(found)


@torch.no_grad()
def greedy(model, prompt: np.ndarray, tokens: int, eos: int) -> list[int]:
    """The trainer's greedy completion, of as many tokens at most."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == eos:
            break
    return ids[0, len(prompt) :].tolist()


def main() -> int:
    """Compare; prints a line per comparison, returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = options.questions.read_text().splitlines()[:QUESTIONS]
    prompts = [np.array(tokenizer(json.loads(line)["question"]).input_ids, "<i4") for line in lines]
    faults = 0
    exact = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    for dtype, fp32_head in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        name = dtype + ", logits in fp32" * fp32_head
        temperatures = [0.0, 1.0, 0.7] if dtype == "float32" else [1.0, 0.7]
        rollouts = asyncio.run(sample(options.model, dtype, fp32_head, prompts, temperatures))
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).eval()
        if 0.0 in rollouts:
            eos = model.generation_config.eos_token_id
            same = sum(
                greedy(model, prompt, NEW_TOKENS, eos) == rollout.token_ids.tolist()
                for prompt, rollout in zip(prompts, rollouts[0.0], strict=True)
            )
            print(f"{name}: {same} of {len(prompts)} greedy answers token-identical")
            faults += same != len(prompts)
        for temperature in temperatures[-2:]:
            engine = np.concatenate([rollout.logprobs for rollout in rollouts[temperature]])
            trainer, reference = (
                logprobs_of(each, prompts, rollouts[temperature], temperature, fp32_head)
                for each in (model, exact)
            )
            found = float(np.abs(trainer - engine).mean())
            rounding = float(np.abs(trainer - reference).mean())
            limit = LIMIT if dtype == "float32" else ROUNDINGS * rounding
            print(
                f"{name}, temperature {temperature}: mean |difference| {found:.2e} (limit {limit:.2g}), "
                f"trainer from fp32 {rounding:.2e}, {len(engine)} tokens"
            )
            faults += found > limit
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
