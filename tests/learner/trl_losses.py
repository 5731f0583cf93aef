"""Losses and gradients of TRL's own code: `python -m tests.learner.trl_losses` writes trl_losses.json.

TRL must be importable, for example by PYTHONPATH. Its method `_compute_loss` is called on a stand-in of
the trainer that has the values of a case; model and generation play no part.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

PATH = Path(__file__).with_name("trl_losses.json")
LENGTHS, WIDTH, LONGEST = (5, 2, 4, 1), 5, 8
ADVANTAGES = (0.8, -1.2, -0.5, 1.5)
OPTIONS = {
    "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.28, "delta": None,
    "beta": 0.0, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0,
}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    *(
        {"loss_type": loss, "importance_sampling_level": level}
        for loss, level in product(
            ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"), ("token", "sequence")
        )
    ),
    {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
    {"loss_type": "dapo", "delta": 1.3},
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    {"loss_type": "grpo", "top_entropy_quantile": 0.3},
    {"loss_type": "dapo", "beta": 0.3},
    {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    {
        "loss_type": "bnpo", "importance_sampling_level": "sequence", "beta": 0.3,
        "use_bias_correction_kl": True, "off_policy_mask_threshold": 0.02, "top_entropy_quantile": 0.3,
    },
]  # fmt: skip


def padded_values(seed: int) -> dict[str, torch.Tensor]:
    """Values of a batch, padded on the right, (B, T) each, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def noise(size: float) -> torch.Tensor:
        return torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64) * size

    logprobs = -noise(1.0).abs()
    old = logprobs + noise(0.3)
    return {
        "logprobs": logprobs, "entropy": noise(1.0).abs(), "old": old, "behaviour": old + noise(0.2),
        "reference": logprobs + noise(0.5),
    }  # fmt: skip


def mask() -> torch.Tensor:
    """Which places hold a token, (B, T)."""
    return (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()


def trl_loss(changes: dict[str, Any], seed: int) -> tuple[float, list[float]]:
    """The loss of TRL with token-level truncation at 2, and its gradient by the tokens' log-probs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    options, values = SimpleNamespace(**OPTIONS | changes), padded_values(seed)
    logprobs = values["logprobs"].clone().requires_grad_()
    alone = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, dim, pad_index: x,
    )  # fmt: skip
    cispo_bound = 1 + options.epsilon_high if options.loss_type == "cispo" else options.epsilon_high
    trainer = SimpleNamespace(
        **{name: getattr(options, name) for name in (
            "loss_type", "importance_sampling_level", "beta", "off_policy_mask_threshold",
            "top_entropy_quantile",
        )},
        epsilon_low=options.epsilon, epsilon_high=cispo_bound, accelerator=alone, use_vllm=True,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        args=SimpleNamespace(**vars(options), steps_per_generation=1), aux_loss_enabled=False,
        model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False, max_completion_length=LONGEST,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, values["entropy"], None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )  # fmt: skip
    trainer.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given)
    ids = torch.zeros(mask().shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": values["old"], "sampling_per_token_logps": values["behaviour"],
        "ref_per_token_logps": values["reference"], "num_items_in_batch": mask().sum(),
        "importance_sampling_ratio": (values["old"] - values["behaviour"]).exp().clamp(max=2.0),
    }  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad[mask().bool()].tolist()


def recorded() -> dict[str, Any]:
    """What the file holds: TRL's release, and each case's loss and gradient."""
    import trl

    cases = []
    for number, changes in enumerate(CHANGES):
        loss, gradient = trl_loss(changes, number)
        rounded = [round(value, 12) for value in gradient]
        cases.append({"changes": changes, "seed": number, "loss": round(loss, 12), "gradient": rounded})
    return {"source": f"TRL {trl.__version__}, GRPOTrainer._compute_loss, in float64", "cases": cases}


if __name__ == "__main__":
    PATH.write_text(json.dumps(recorded()) + "\n")
