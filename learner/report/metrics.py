"""Metrics of an Update and of the groups it was made of, by TRL's names. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import Disagreement
from penstock.common.reward_totals import total_rewards
from penstock.common.wire.messages import Rollout, ScoredGroup
from penstock.learner.policy.update import TokenRecord, Update
from penstock.learner.streams.intake import Arrivals


def update_metrics(update: Update) -> dict[str, float | None]:
    """Return the metrics of an Update, by their names in metrics.jsonl, such as "grad_norm".

    loss and grad_norm (None if every optimizer step was skipped), learning_rate, num_tokens (trained
    ones), optimizer_steps and the number of skipped ones are always there. entropy_coef is there if the
    coefficient is adaptive. If a token was trained, so are: the means of entropy and kl; the shares of
    tokens clipped below, above, and both together; minimum, mean, maximum and standard deviation of the
    importance ratio, and the share of tokens whose ratio was bounded; mean and maximum of staleness; the
    metrics of `agreement`.
    """
    tokens = update.tokens
    metrics: dict[str, float | None] = {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        "num_tokens": len(tokens.ratio),
        "optimizer_steps": update.optimizer_steps,
        "optimizer_steps/skipped": update.skipped,
    }
    if update.entropy_coef is not None:
        metrics["entropy_coef"] = update.entropy_coef
    if len(tokens.ratio) == 0:
        return metrics
    low, high = tokens.clipped_low.mean(), tokens.clipped_high.mean()
    ratio = np.exp(np.clip(tokens.logprobs - tokens.behaviour, -80.0, 80.0))  # to the sampling policy
    return metrics | {
        "entropy": float(tokens.entropy.mean()),
        "kl": float(tokens.kl.mean()),
        "clip_ratio/low_mean": float(low),
        "clip_ratio/high_mean": float(high),
        "clip_ratio/region_mean": float(low + high),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
        "sampling/importance_sampling_ratio/std": float(ratio.std()),
        "sampling/importance_sampling_ratio/bounded": float(tokens.bounded.mean()),
        "sample/staleness_mean": float(tokens.staleness.mean()),
        "sample/staleness_max": int(tokens.staleness.max()),
        **agreement(tokens),
    }


def describe_shares(seconds: Mapping[str, float]) -> str:
    """Return the shares of the phases in their sum, largest first, such as "running forward 31%".

    Phases under 1% are left out. `seconds` is by phase, with a sum above 0.
    """
    whole = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {spent / whole:.0%}" for name, spent in ordered if spent >= whole / 100)


FEWEST_COMPARED = 256
"""Tokens that a comparison of engine and trainer needs: one alone may differ by much."""


def agreement(tokens: TokenRecord) -> dict[str, float]:
    """Return mean and maximum of |trainer - engine| log-probability, by name; {} if no token counts.

    The names are sampling/sampling_logp_difference/mean and /max. A token counts if its value was
    computed before the Update's first optimizer step, and the version in training sampled its whole
    completion. For a token after an older one the engine's keys and values are those of older weights.
    """
    difference = _differences(tokens)
    if not len(difference):
        return {}
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
    }


def _differences(tokens: TokenRecord) -> np.ndarray:
    """Return |trainer - engine| log-probability of the tokens that count, see `agreement`."""
    equal = (tokens.oldest == 0) & tokens.first.astype(bool)
    found: np.ndarray = np.abs(tokens.logprobs[equal] - tokens.behaviour[equal])
    return found


def check_agreement(update: Update, settings: LearnerSettings) -> None:
    """Raise Disagreement if trainer and engine differ by more than max_logp_difference in an Update.

    The difference is sampling/sampling_logp_difference/mean, of 256 tokens or more. It may be any with a
    limit of 0, and where the engine samples from another distribution on purpose: repetition_penalty,
    accept_sampling_bias.
    """
    biased = settings.accept_sampling_bias or "repetition_penalty" in settings.generation_kwargs
    limit = 0.0 if biased else settings.max_logp_difference
    differences = _differences(update.tokens)
    found = float(differences.mean()) if len(differences) >= FEWEST_COMPARED else 0.0
    if limit and found > limit:
        raise Disagreement(
            f"engine and trainer differ by {found:.3g} nats per token on average, with the same "
            f"weights, expected at most {limit:g} (LEARNER_MAX_LOGP_DIFFERENCE): the actors compute "
            "another model than the learner. Compare their versions of vLLM and transformers, precision "
            "and ACTOR_ENGINE_ARGS; the journal has the batch"
        )


def group_metrics(
    groups: Sequence[ScoredGroup], arrivals: Arrivals, weights: dict[str, float]
) -> dict[str, float]:
    """Return a step's metrics of rewards, lengths and ended tickets, by their names in metrics.jsonl.

    The step trains `groups`; `arrivals` are the other outcomes since the batch before, and `weights` has
    by reward name the factor in the total. Rewards, lengths and what rewards logged are those of trained
    and filtered groups. trained/ and dropped/ compare the trained groups with those dropped for passing
    max_staleness. The metrics of `tool_metrics` and `_continued` are added. What has no values is left
    out, such as the share of cut completions without groups. Raise KeyError if a reward has no weight.
    """
    rewards = [group.rewards for group in groups]
    rewards += [verdict.rewards for verdict in arrivals.filtered if verdict.rewards]
    applied = [total[~np.isnan(total)] for total in (total_rewards(one, weights) for one in rewards)]
    rollouts = [rollout for group in groups for rollout in group.group.rollouts]
    lengths = [rollout.length for rollout in rollouts]
    lengths += [length for verdict in arrivals.filtered for length in verdict.lengths]
    spreads = [np.std(total, ddof=1) for total in applied if len(total) > 1]
    logged = [group.metrics for group in groups] + [verdict.metrics for verdict in arrivals.filtered]
    custom = sorted({name for one in logged for name in one})
    failures = [failure for group in groups for failure in group.failures if failure]
    metrics: dict[str, float] = {
        **{name: float(np.mean([m[name] for m in logged if name in m])) for name in custom},
        **_mean("reward", [np.mean(total) for total in applied if len(total)]),
        **_mean("reward_std", spreads),
        **_mean("frac_reward_zero_std", [spread < 1e-6 for spread in spreads]),
        **_mean("completions/mean_length", lengths),
        **({"completions/min_length": min(lengths)} if lengths else {}),
        **({"completions/max_length": max(lengths)} if lengths else {}),
        **_mean("completions/clipped_ratio", [one.finish_reason == "length" for one in rollouts]),
        "groups/filtered": len(arrivals.filtered),
        "groups/dead": arrivals.dead,
        "groups/stale": arrivals.stale,
        **{f"refused/{reason}": count for reason, count in arrivals.refused.items()},
        "dropped/groups": len(arrivals.dropped),
        "dropped/total_groups": arrivals.total_dropped,
        **_averages("trained", groups, weights),
        **_averages("dropped", arrivals.dropped, weights),
        "rewards/unscored": len(failures),
        **(tool_metrics(rollouts) | _continued(rollouts)),
    }
    for name in weights:
        found = [value for group in rewards for value in group.get(name, ())]
        metrics[f"rewards/{name}/none"] = found.count(None) - len(failures)
        if values := [value for value in found if value is not None]:
            metrics[f"rewards/{name}/mean"] = float(np.mean(values))
            metrics[f"rewards/{name}/std"] = float(np.std(values))
    return metrics


def _continued(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Return how many rollouts an actor continued for one that had to end; {} if none was continued.

    `continued/completions` counts them, `continued/tokens` the tokens that were kept.
    """
    kept = [
        sum(span.end - span.start for one in rollout.sequences for span in one.spans if span.actor)
        for rollout in rollouts
    ]
    count = sum(tokens > 0 for tokens in kept)
    return {"continued/completions": count, "continued/tokens": sum(kept)} if count else {}


def tool_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of conversations, by name; {} if none of the rollouts is one.

    `tools/call_frequency` is the number of calls per conversation, `tools/failure_frequency` the share
    of calls that failed, 0 without calls; both names are TRL's. `turns` is the mean number of
    completions of a conversation, `environment/failed` counts conversations whose tool, environment or
    agent broke. `completions/sampled_ratio` is the share of the tokens of all `rollouts` that the policy
    sampled. `agent/NAME` is the mean of the numbers NAME that agents returned beside the reward.
    """
    talks = [rollout.transcript for rollout in rollouts if rollout.transcript]
    if not talks:
        return {}
    calls = sum(talk.tool_calls for talk in talks)
    tokens = sum(rollout.length for rollout in rollouts)
    sampled = sum(int(one.mask.sum()) for rollout in rollouts for one in rollout.sequences)
    names = sorted({name for talk in talks for name in talk.metrics})
    return {
        **{
            f"agent/{name}": float(np.mean([t.metrics[name] for t in talks if name in t.metrics]))
            for name in names
        },
        "tools/call_frequency": calls / len(talks),
        "tools/failure_frequency": sum(talk.tool_failures for talk in talks) / max(1, calls),
        "turns": float(np.mean([talk.turns for talk in talks])),
        "environment/failed": sum(bool(talk.failure) for talk in talks),
        "completions/sampled_ratio": sampled / tokens,
    }


def _averages(name: str, groups: Sequence[ScoredGroup], weights: dict[str, float]) -> dict[str, float]:
    """Return NAME/reward and NAME/mean_length of `groups`, NAME being `name`; {} without groups.

    The reward is the mean over groups of the mean total reward, by the factors in `weights` for each
    reward's name; left out if no rollout has a reward. The length is the mean over completions, in
    tokens. Raise KeyError if a reward has no weight.
    """
    totals = [total_rewards(scored.rewards, weights) for scored in groups]
    rewards = [np.nanmean(total) for total in totals if not np.isnan(total).all()]
    lengths = [rollout.length for scored in groups for rollout in scored.group.rollouts]
    return _mean(f"{name}/reward", rewards) | _mean(f"{name}/mean_length", lengths)


def _mean(name: str, values: Sequence[Any]) -> dict[str, float]:
    """Return the mean of the numbers `values` as {name: mean}; {} if there is no number."""
    return {name: float(np.mean(values))} if len(values) else {}
