"""Training on conversations: the tokens of tools and environments are context, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Rollout, ScoredGroup, Version
from penstock.common.wire.transcript import Transcript
from penstock.learner.algorithm.batch import build_batch, is_over_lag
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.metrics import tool_metrics
from penstock.learner.streams.refusal import why_refused
from tests.common.builders import make_span
from tests.learner.builders import make_group, make_plan, make_settings
from tests.learner.trained import make_policy, same, weights_of
from tests.learner.whole import WEIGHTS_HASH

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = np.array([True, True, False, False, True, True, True])
TALK = Transcript(({"role": "assistant", "content": "x"},), 2, 3, 1, 0.5)
SETTINGS = {"beta": 0.1, "num_iterations": 2, "entropy_coef": 0.01, "learning_rate": 1e-3}


def make_talk(logprob_of_answers: float = 0.0, late: int = 0) -> Rollout:
    """Two turns of two and three tokens, with two tokens of a tool between; the second of `late`."""
    return Rollout(
        token_ids=np.arange(3, 10, dtype="<i4"),
        logprobs=np.where(SAMPLED, -1.0, logprob_of_answers).astype("<f4"),
        mask=SAMPLED,
        spans=(make_span(Version(1, 0), 0, 2), make_span(Version(1, late), 4, 7)),
        finish_reason="stop",
        transcript=TALK,
    )


def group_of(*rollouts: Rollout) -> ScoredGroup:
    ticket = make_plan(make_settings()).source.train(TicketId("train:0"), Version(1, 0))
    group = make_group(ticket)
    return replace(group, group=replace(group.group, rollouts=rollouts))


def trained(model_folder, group: ScoredGroup, **settings: object) -> tuple[float, dict]:
    """The loss of an Update on a group, and the weights after it."""
    made = make_settings(**(SETTINGS | settings))
    policy = make_policy(model_folder, **(SETTINGS | settings))
    update = policy.update(build_batch([group], {"accuracy": 1.0}, 0, made), 0)
    return update.loss, weights_of(policy)


@pytest.mark.parametrize("settings", [{}, {"loss_type": "gspo"}, {"decoupled_loss": True}], ids=str)
def test_log_probabilities_of_answers_change_no_bit(model_folder, settings) -> None:
    plain = trained(model_folder, group_of(make_talk(), make_talk()), **settings)
    other = trained(model_folder, group_of(make_talk(-7.0), make_talk(-100.0)), **settings)
    assert plain[0] == other[0]
    assert same(plain[1], other[1])


def test_two_turns_are_trained_as_the_same_tokens_of_one_completion(model_folder) -> None:
    """With the answers sampled as well, the same tokens in the same places have the same gradients."""
    talk = make_talk()
    ticket = group_of(talk, talk).group.ticket
    policy = make_policy(model_folder)
    (turns, *_) = build_batch([group_of(talk, talk)], {"accuracy": 1.0}, 0, make_settings()).sequences
    whole = replace(turns, mask=np.ones(7, bool))
    (one,), (other,) = policy.logprobs([turns]), policy.logprobs([whole])
    assert one.tolist() == other.tolist()
    assert turns.prompt_ids.tolist() == ticket.prompt_ids.tolist()


def test_the_loss_of_two_turns_is_that_of_their_tokens_alone(model_folder) -> None:
    """Slowly: the loss of a token is the advantage times its ratio; an answer's token has none."""
    settings = {
        "learning_rate": 0.0001,
        "importance_sampling_correction": "off",
        "scale_rewards": "none",
    }
    made = make_settings(**settings)
    batch = build_batch([group_of(make_talk(), make_talk())], {"accuracy": 1.0}, 0, made)
    policy = make_policy(model_folder, **settings)
    total = count = 0.0
    for sequence in batch.sequences:
        ids = torch.tensor(np.concatenate([sequence.prompt_ids, sequence.token_ids])[None].astype(int))
        logits = policy.model(input_ids=ids).logits[0].float()
        chosen = torch.log_softmax(logits.detach(), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        for place in np.flatnonzero(SAMPLED):
            ratio = float(torch.exp(chosen[len(sequence.prompt_ids) - 1 + place] + 1.0))
            advantage = sequence.advantage
            total -= min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.28))
            count += 1
    assert policy.update(batch, 0).loss == pytest.approx(total / count, rel=1e-5)


def test_the_prompt_that_an_environment_extended_is_trained() -> None:
    own = np.array([7, 8, 9, 10], dtype="<i4")
    group = group_of(make_talk(), replace(make_talk(), prompt_ids=own))
    batch = build_batch([group], {"accuracy": 1.0}, 0, make_settings())
    ticket = group.group.ticket
    assert [one.prompt_ids.tolist() for one in batch.sequences] == [
        ticket.prompt_ids.tolist(), own.tolist(),
    ]  # fmt: skip


def test_the_age_of_answers_does_not_count() -> None:
    group = group_of(make_talk(late=2), make_talk(late=2))
    settings = make_settings(max_staleness=1)
    assert not is_over_lag(group, 3, settings)
    (sequence, *_) = build_batch([group], {"accuracy": 1.0}, 3, settings).sequences
    assert sequence.mask.tolist() == [False] * 4 + [True] * 3


def refused(rollout: Rollout, longest_prompt: int, episodes: bool = True) -> str | None:
    scored = group_of(rollout, rollout)
    hashes = {Version(1, 0): WEIGHTS_HASH}
    spans = tuple(replace(span, hash=WEIGHTS_HASH) for span in rollout.spans)
    scored = group_of(*[replace(rollout, spans=spans)] * 2)
    return why_refused(scored, scored.group.ticket, hashes, 32, scored.rewards, longest_prompt, episodes)


def test_a_conversation_is_refused_in_a_run_without_tools() -> None:
    assert refused(make_talk(), 8) is None
    assert refused(make_talk(), 0) is None
    assert refused(make_talk(), 0, episodes=False) == "episode"
    whole = replace(make_talk(), mask=np.ones(7, bool), spans=(make_span(Version(1, 0), 0, 7),))
    assert refused(whole, 0, episodes=False) == "episode"
    bare = replace(whole, transcript=None)
    assert refused(bare, 0, episodes=False) is None
    assert refused(replace(bare, finish_reason="turns"), 0, episodes=False) == "episode"


def test_an_own_prompt_is_refused_if_it_is_too_long_or_unknown() -> None:
    assert refused(replace(make_talk(), prompt_ids=np.full(9, 3, "<i4")), 8) == "prompt"
    assert refused(replace(make_talk(), prompt_ids=np.full(8, 3, "<i4")), 8) is None
    assert refused(replace(make_talk(), prompt_ids=np.array([32], "<i4")), 8) == "tokens"
    own = replace(make_talk(), prompt_ids=np.array([3], "<i4"))
    assert refused(own, 0) == "prompt", "a run with tools alone has the prompts of its tickets"


def test_metrics_of_tools() -> None:
    quiet = replace(make_talk(), transcript=Transcript(turns=1, failure="tool up ended its process"))
    assert tool_metrics([make_talk(), quiet]) == {
        "tools/call_frequency": 1.5,
        "tools/failure_frequency": pytest.approx(1 / 3),
        "turns": 1.5,
        "environment/failed": 1,
        "completions/sampled_ratio": pytest.approx(5 / 7),
    }
    assert tool_metrics([replace(make_talk(), transcript=None)]) == {}


def test_the_table_of_completions_shows_the_turns() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = (
        {"role": "user", "content": "It stands at 5."},
        {"role": "assistant", "content": "First:", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "no b", "failed": True},
        {"role": "assistant", "content": "12\n[tool add] 12 is right\r[tool add] yes"},
    )
    rollout = replace(make_talk(), transcript=Transcript(messages, 2, 1, 1))
    group = group_of(rollout, replace(make_talk(), transcript=None))
    batch = build_batch([group], {"accuracy": 1.0}, 0, make_settings())
    one, other = completion_rows(1, [group], [], batch, {"accuracy": 1.0})
    assert one["completion"].splitlines() == [
        "[user] It stands at 5.",
        "[assistant] First:",
        '  add {"a": 1}',
        "[tool add] (failed) no b",
        "[assistant] 12",
        "  [tool add] 12 is right",
        "  [tool add] yes",
    ]
    assert other["completion"] == group.texts[1]
