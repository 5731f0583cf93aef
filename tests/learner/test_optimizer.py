"""The learning rate's course."""

from __future__ import annotations

import pytest
import torch

from penstock.learner.policy.optimizer import learning_rate, make_optimizer
from tests.learner.builders import make_settings


def rates(steps: int, **settings) -> list[float]:
    """Learning rates of a run's Updates, and the one after them."""
    made = make_settings(learning_rate=1.0, **settings)
    return [learning_rate(made, step, steps) for step in range(steps + 1)]


def test_a_constant_rate_rises_over_the_warm_up_and_stays():
    assert rates(5, warmup_steps=2) == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_a_warm_up_may_be_a_share_of_the_run():
    assert rates(5, warmup_ratio=0.4) == rates(5, warmup_steps=2)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_linear_and_cosine_go_from_the_peak_to_min_lr(kind):
    found = rates(10, lr_scheduler_type=kind, min_lr=0.1)
    assert found[0] == 1.0
    assert found[10] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)
    assert found[5] == pytest.approx(0.55)
    assert (found[2] > 0.85) == (kind == "cosine")


def test_parameters_that_are_frozen_are_not_given_to_the_optimizer():
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(1))
    optimizer = make_optimizer([frozen, trained], make_settings())
    assert optimizer.param_groups[0]["params"] == [trained]


def test_the_optimizer_has_the_settings():
    made = make_settings(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    (group,) = make_optimizer([torch.nn.Parameter(torch.ones(1))], made).param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.3, (0.8, 0.95), 1e-6)
