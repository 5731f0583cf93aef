"""Options of generation: what is taken, what tickets carry, the correction of a penalty."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from penstock.common.errors import ConfigError
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Ticket
from penstock.learner.algorithm.loss import LossOptions, LossTokens, policy_loss
from penstock.learner.data.plan import check_sampling
from tests.learner.builders import make_plan, make_settings

ALL = {
    "stop": ["</answer>", "Q:"],
    "repetition_penalty": 1.1,
    "structured_outputs": {"regex": r"\d{1,3}"},
}
CORRECTED = {"decoupled_loss": True}


def test_tickets_carry_the_options_also_those_of_evaluations() -> None:
    source = make_plan(make_settings(generation_kwargs=ALL), eval_questions=1).source
    for ticket in (
        source.train(TicketId("train:0"), Version(1, 0)), source.evaluation(Version(1, 0), 0)
    ):  # fmt: skip
        sampling = decode(encode(ticket), Ticket).sampling
        assert (sampling.stop, sampling.repetition_penalty) == (("</answer>", "Q:"), 1.1)
        assert (sampling.regex, sampling.choice) == (r"\d{1,3}", ())
    other = make_settings(generation_kwargs={"stop": "x", "structured_outputs": {"choice": ["a", "b"]}})
    sampling = make_plan(other).source.train(TicketId("train:0"), Version(1, 0)).sampling
    assert (sampling.stop, sampling.regex, sampling.choice) == (("x",), "", ("a", "b"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"typical_p": 0.9}, "'typical_p' is not taken: expected stop, repetition_penalty, structured"),
        ({"presence_penalty": 1}, "'presence_penalty' is not taken"),
        ({"logit_bias": {"1": 2}}, "'logit_bias' is not taken"),
        ({"temperature": 0.5}, "set LEARNER_TEMPERATURE"),
        ({"max_new_tokens": 5}, "set LEARNER_MAX_COMPLETION_LENGTH"),
        ({"stop": 3}, "stop: expected texts, such as .*, found 3"),
        ({"stop": []}, "stop: expected texts"),
        ({"stop": ["a", None]}, "stop: expected texts"),
        ({"stop": ""}, "stop has an empty text"),
        ({"stop": ["x"] * 17}, "expected at most 16"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty: expected a number"),
        ({"repetition_penalty": True}, "repetition_penalty: expected a number"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0.0, expected 0.1 to 10.0"),
        ({"structured_outputs": "a"}, "structured_outputs: expected .*regex.* or .*choice"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs: expected"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs: expected"),
        ({"structured_outputs": {"regex": ""}}, "regex: expected letters"),
        ({"structured_outputs": {"choice": "ab"}}, "choice: expected texts"),
        ({"structured_outputs": {"regex": "(a{999}){999}"}}, "states; lower its counts"),
    ],
    ids=str,
)
def test_anything_else_is_refused_by_name_with_what_is_taken(options, words) -> None:
    for given in (options, json.dumps(options)):
        with pytest.raises(ValidationError, match=rf"LEARNER_GENERATION_KWARGS: .*{words}"):
            make_settings(generation_kwargs=given)


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"structured_outputs": {"regex": "a"}}, CORRECTED, "structured_outputs renormalises"),
        ({"structured_outputs": {"choice": ["a"]}}, {}, "structured_outputs renormalises"),
        ({"repetition_penalty": 1.1}, {}, "LEARNER_DECOUPLED_LOSS=true"),
        ({"repetition_penalty": 0.9}, CORRECTED | {"loss_type": "dppo"}, "other than dppo"),
        (
            {"repetition_penalty": 1.1}, CORRECTED | {"importance_sampling_correction": "off"},
            "other than off",
        ),
    ],
)  # fmt: skip
def test_what_biases_the_ratio_is_refused_unless_accepted(options, changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        check_sampling(make_settings(generation_kwargs=options, **changes))
    check_sampling(make_settings(generation_kwargs=options, **changes, accept_sampling_bias=True))


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}), ({"stop": ["x"]}, {}), ({"repetition_penalty": 1.0}, {}),
        ({"repetition_penalty": 1.3}, CORRECTED),
    ],
)  # fmt: skip
def test_what_does_not_bias_it_passes(options, changes) -> None:
    check_sampling(make_settings(generation_kwargs=options, **changes))


def expected_gradient(logits: torch.Tensor, sampler: torch.Tensor, **changes: object) -> torch.Tensor:
    """The loss's gradient over all tokens that the sampler may draw, each with its probability."""
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, -1.0], dtype=torch.float64)
    count = len(advantages)
    free = logits.clone().requires_grad_()
    logprobs = free.log_softmax(0)
    behaviour = sampler.log_softmax(0)
    decoupled = bool(changes.get("decoupled_loss"))
    tokens = LossTokens(
        logprobs_N=logprobs, entropy_N=torch.zeros(count), behaviour_N=behaviour,
        old_N=logprobs.detach() if decoupled else behaviour, reference_N=None,
        advantages_N=advantages, weight_N=behaviour.exp(), mask_N=torch.ones(count, dtype=torch.bool),
        sequence_N=torch.arange(count), sequences=count,
    )  # fmt: skip
    settings = make_settings(importance_sampling_cap=100.0, **changes)
    policy_loss(tokens, LossOptions.from_settings(settings)).loss.backward()
    assert free.grad is not None
    return free.grad


def test_the_decoupled_loss_corrects_a_repetition_penalty() -> None:
    """Its expected gradient is that of tokens of the policy itself; the direct one's is not."""
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, -0.5], dtype=torch.float64)
    repeated = torch.tensor([True, True, False, False, True])
    penalized = torch.where(repeated, torch.where(logits > 0, logits / 1.5, logits * 1.5), logits)
    for loss_type in ("dapo", "cispo"):
        changes = {"loss_type": loss_type, "epsilon_high": 0.2}
        on_policy = expected_gradient(logits, logits, **changes)
        corrected = expected_gradient(logits, penalized, **changes, **CORRECTED)
        assert torch.allclose(corrected, on_policy, atol=1e-9)
        direct = expected_gradient(logits, penalized, **changes)
        assert not torch.allclose(direct, on_policy, atol=1e-2)


def test_a_ticket_with_other_options_is_another_ticket() -> None:
    ticket = make_plan(make_settings()).source.train(TicketId("train:0"), Version(1, 0))
    changed = replace(ticket, sampling=replace(ticket.sampling, stop=("x",)))
    assert encode(changed) != encode(ticket)
