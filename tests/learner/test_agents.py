"""Rollouts of several sequences, as agents make them: one reward, one weight, all tokens trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.common.errors import MalformedMessage
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.limits import MOST_SEQUENCES
from penstock.common.wire.messages import Rollout, ScoredGroup, Version
from penstock.common.wire.transcript import Transcript
from penstock.learner.algorithm.batch import Batch, build_batch, is_over_lag
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.metrics import group_metrics, tool_metrics
from penstock.learner.streams.intake import Arrivals
from penstock.learner.streams.refusal import why_refused
from tests.common.builders import make_span
from tests.learner.builders import make_settings
from tests.learner.test_conversations import group_of
from tests.learner.trained import make_policy
from tests.learner.whole import WEIGHTS_HASH

pytestmark = pytest.mark.usefixtures("one_thread")

TALK = Transcript(({"role": "assistant", "content": "x"},), 4, 1, 0, 0.5, "", {"steps": 4.0})


def make_sequence(first: int, length: int, step: int = 0, digest: str = "") -> Rollout:
    """A sequence with a prompt of its own, of weights 1.`step`."""
    return Rollout(
        token_ids=np.arange(first, first + length, dtype="<i4"),
        logprobs=np.full(length, -1.0, dtype="<f4"),
        mask=np.ones(length, dtype=bool),
        spans=(make_span(Version(1, step), 0, length, digest),),
        finish_reason="stop",
        prompt_ids=np.array([first, 4], dtype="<i4"),
    )


def make_rollout(*lengths: int, step: int = 0, digest: str = "") -> Rollout:
    """A rollout with a sequence of each length; the last is of weights 1.`step`."""
    *earlier, last = lengths
    others = tuple(make_sequence(5 + n, length, digest=digest) for n, length in enumerate(earlier))
    return replace(make_sequence(9, last, step, digest), transcript=TALK, earlier=others)


def test_a_rollout_of_several_sequences_goes_through_bytes() -> None:
    scored = group_of(make_rollout(2, 3, 4), make_rollout(5))
    again = decode(encode(scored), ScoredGroup)
    assert encode(again) == encode(scored)
    first, second = again.group.rollouts
    assert [len(one.token_ids) for one in first.sequences] == [2, 3, 4]
    assert (first.length, second.length) == (9, 5)
    assert first.transcript is not None
    assert first.transcript.metrics == {"steps": 4.0}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: replace(one, prompt_ids=np.zeros(0, "<i4")),
        lambda one: replace(one, transcript=TALK),
        lambda one: replace(one, earlier=(make_sequence(3, 2),)),
    ],
    ids=["no prompt", "a transcript", "sequences of its own"],
)
def test_what_is_no_sequence_is_malformed(spoil: Callable[[Rollout], Rollout]) -> None:
    whole = make_rollout(2, 3)
    with pytest.raises(MalformedMessage, match="an earlier sequence has"):
        replace(whole, earlier=(spoil(whole.earlier[0]),))


def test_too_many_sequences_are_malformed() -> None:
    make_rollout(*[1] * MOST_SEQUENCES)
    with pytest.raises(MalformedMessage, match=r"at most 63 earlier sequences; .* found: 64"):
        make_rollout(*[1] * (MOST_SEQUENCES + 1))
    with pytest.raises(MalformedMessage, match="metric steps is inf"):
        replace(TALK, metrics={"steps": float("inf")})


def batch_of(*rollouts: Rollout, **settings: object) -> Batch:
    return build_batch([group_of(*rollouts)], {"accuracy": 1.0}, 0, make_settings(**settings))


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_the_loss_of_several_sequences_equals_slow_loops(model_folder, loss_type: str) -> None:
    """Per token: the mean over all tokens. Per rollout: the mean over the tokens of its sequences."""
    settings = {
        "learning_rate": 0.0001, "importance_sampling_correction": "off", "scale_rewards": "none",
        "loss_type": loss_type,
    }  # fmt: skip
    batch = batch_of(make_rollout(2, 3, 1), make_rollout(5), **settings)
    assert batch.owners == (0, 0, 0, 1)
    assert [len(one.token_ids) for one in batch.sequences] == [2, 3, 1, 5]
    policy = make_policy(model_folder, **settings)
    total = 0.0
    tokens_of = [6, 5]
    for owner, sequence in zip(batch.owners, batch.sequences, strict=True):
        ids = torch.tensor(np.concatenate([sequence.prompt_ids, sequence.token_ids])[None].astype(int))
        logits = policy.model(input_ids=ids).logits[0].float()
        chosen = torch.log_softmax(logits.detach(), -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        weight = {"grpo": 1 / (2 * tokens_of[owner]), "dr_grpo": 1 / (2 * 8)}.get(loss_type, 1 / 11)
        for place in range(len(sequence.token_ids)):
            ratio = float(torch.exp(chosen[len(sequence.prompt_ids) - 1 + place] + 1.0))
            advantage = sequence.advantage
            total -= weight * min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.28))
    assert policy.update(batch, 0).loss == pytest.approx(total, rel=1e-5)


def test_the_sequences_of_a_rollout_share_advantage_and_mini_batch(model_folder) -> None:
    batch = batch_of(make_rollout(2, 3), make_rollout(1, 1, 1))
    assert len({one.advantage for one in batch.sequences[:2]}) == 1
    assert batch.sequences[0].advantage == -batch.sequences[2].advantage
    policy = make_policy(model_folder, num_mini_batches=3, shuffle_mini_batch=False)
    minis = policy._mini_batches(batch, 0)
    assert [one.sequences.tolist() for one in minis] == [[0, 1], [2, 3, 4]]
    alone = batch_of(make_rollout(5), make_rollout(3))
    assert [one.weights.tolist() for one in policy._mini_batches(alone, 0)] == [
        [one.weights[0]] for one in minis
    ], "a rollout's tokens weigh the same in however many sequences"


def test_each_sequence_has_its_own_age_and_mask() -> None:
    late = make_rollout(2, 3, step=2)
    settings = make_settings(max_staleness=1)
    old, new, *_ = build_batch([group_of(late, late)], {"accuracy": 1.0}, 3, settings).sequences
    assert (old.mask.any(), new.mask.all()) == (False, True)
    assert is_over_lag(group_of(late, late), 3, make_settings(max_staleness=1, over_lag="set_aside"))
    cut = replace(make_rollout(2, 3), finish_reason="length")
    batch = batch_of(cut, cut, mask_truncated_completions=True)
    assert [one.mask.all() for one in batch.sequences] == [True, False] * 2


def refused(rollout: Rollout, most: int, episodes: bool = True, longest_prompt: int = 2) -> str | None:
    scored = group_of(rollout, rollout)
    hashes = {Version(1, 0): WEIGHTS_HASH}
    asked = scored.group.ticket
    return why_refused(scored, asked, hashes, 32, scored.rewards, longest_prompt, episodes, most)


def test_forged_sequences_are_refused() -> None:
    good = make_rollout(2, 3, digest=WEIGHTS_HASH)
    assert refused(good, 2) is None
    assert refused(good, 1) == "episode"
    assert refused(good, 2, episodes=False) == "episode"
    assert refused(good, 2, longest_prompt=1) == "prompt"
    first = good.earlier[0]
    for reason, forged in {
        "hash": make_sequence(5, 2),
        "version": make_sequence(5, 2, step=1, digest=WEIGHTS_HASH),
        "prompt": replace(first, prompt_ids=np.full(3, 3, "<i4")),
        "tokens": replace(first, prompt_ids=np.array([32], "<i4")),
    }.items():
        assert refused(replace(good, earlier=(forged,)), 2) == reason
    assert refused(make_rollout(9, 1, digest=WEIGHTS_HASH), 2) == "tokens"


def test_metrics_and_tables_count_all_sequences() -> None:
    group = group_of(make_rollout(2, 3), make_rollout(4))
    batch = build_batch([group], {"accuracy": 1.0}, 0, make_settings())
    one, other = completion_rows(1, [group], [], batch, {"accuracy": 1.0})
    assert one["completion"].splitlines()[0] == "(2 sequences; the last:)"
    assert other["completion"] == "[assistant] x"
    assert (one["completion_length"], one["versions"]) == (5, "1.0:0-2 | 1.0:0-3")
    assert (one["advantage"], other["advantage"]) == (
        batch.sequences[0].advantage, batch.sequences[2].advantage,
    )  # fmt: skip
    assert tool_metrics(group.group.rollouts)["agent/steps"] == 4.0
    metrics = group_metrics([group], Arrivals(), {"accuracy": 1.0})
    assert (metrics["completions/max_length"], metrics["completions/mean_length"]) == (5, 4.5)
