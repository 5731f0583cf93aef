"""The learning rate's course."""

from __future__ import annotations

import pytest
import torch

from learner.optimizer import learning_rate_factor, make_optimizer, make_scheduler
from tests.learner.builders import make_settings


def rates(steps: int, **settings) -> list[float]:
    """Learning rates of a run's optimizer steps."""
    made = make_settings(learning_rate=1.0, **settings)
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(1))], made)
    scheduler = make_scheduler(optimizer, made, steps)
    found = []
    for _ in range(steps * made.num_iterations * made.num_mini_batches):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_a_constant_rate_rises_over_the_warm_up_and_stays():
    assert rates(5, warmup_steps=2) == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_a_warm_up_may_be_a_share_of_the_run():
    assert rates(5, warmup_ratio=0.4) == rates(5, warmup_steps=2)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_linear_and_cosine_go_from_the_peak_to_min_lr(kind):
    found = [learning_rate_factor(step, 10, 0, kind, 0.1) for step in range(11)]
    assert found[0] == 1.0
    assert found[10] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)
    assert found[5] == pytest.approx(0.55)
    assert (found[2] > 0.85) == (kind == "cosine")


def test_the_floor_is_min_lr_in_units_of_the_rate():
    assert rates(10, lr_scheduler_type="linear", min_lr=0.5)[-1] == pytest.approx(0.55)


def test_the_schedule_spans_all_optimizer_steps_of_the_updates():
    twice = rates(4, lr_scheduler_type="linear", num_iterations=2)
    assert len(twice) == 8
    assert twice[4] == pytest.approx(rates(4, lr_scheduler_type="linear")[2])


def test_parameters_that_are_frozen_are_not_given_to_the_optimizer():
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(1))
    optimizer = make_optimizer([frozen, trained], make_settings())
    assert optimizer.param_groups[0]["params"] == [trained]
