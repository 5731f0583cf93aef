"""Checks across roles: settings of one role that do not fit those of another, or the machine."""

from collections.abc import Iterator, Mapping

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import ActorSettings
from penstock.deploy.doctor.finding import Finding, Severity, assign
from penstock.deploy.doctor.machine import Machine
from penstock.deploy.doctor.settings import Settings

_Rule = tuple[bool, Severity, str, str, Mapping[str, object]]
"""Whether the rule applies; the severity; what was found; why this matters; what to set."""


def check_roles(settings: Settings, machine: Machine, gpu: bool) -> Iterator[Finding]:
    """Yield findings on settings of the roles that do not fit each other, or the machine.

    `gpu`: the roles use the machine's GPUs.
    """
    rules = [
        *_of_contract(settings.learner, settings.actor),
        *_of_work(settings.learner, settings.actor),
        *_of_place(settings, machine, gpu),
    ]
    for applies, severity, found, why, values in rules:
        if applies:
            yield Finding("roles", severity, found, why, assign(values))


def _of_contract(learner: LearnerSettings, actor: ActorSettings) -> list[_Rule]:
    """Return the rules on lengths, code and precision, which learner and actor share."""
    tokens = learner.max_prompt_length + learner.max_completion_length
    trusting = "ACTOR" if learner.trust_remote_code else "LEARNER"
    return [
        (
            0 < actor.max_model_len < tokens, "error",
            f"ACTOR_MAX_MODEL_LEN={actor.max_model_len}, but a sequence has up to {tokens} tokens",
            "vLLM refuses longer sequences, and their tickets end dead",
            {"ACTOR_MAX_MODEL_LEN": 0},
        ),
        (
            learner.trust_remote_code != actor.trust_remote_code, "error",
            "only one of LEARNER_TRUST_REMOTE_CODE and ACTOR_TRUST_REMOTE_CODE is true",
            "learner and actor would compute with different code, or one of them not start",
            {f"{trusting}_TRUST_REMOTE_CODE": True},
        ),
        (
            actor.dtype not in ("", learner.dtype), "warning",
            f"ACTOR_DTYPE={actor.dtype}, but the learner computes in {learner.dtype}",
            "the log-probabilities differ, so the ratio of the policies is off from the first token on",
            {"ACTOR_DTYPE": learner.dtype},
        ),
    ]  # fmt: skip


def _of_work(learner: LearnerSettings, actor: ActorSettings) -> list[_Rule]:
    """Return the rules on the amount of work: groups at a time, evaluations."""
    size = learner.num_generations
    return [
        (
            actor.max_num_seqs < size, "warning",
            f"ACTOR_MAX_NUM_SEQS={actor.max_num_seqs}, but LEARNER_NUM_GENERATIONS={size}",
            "not even one group is generated at a time",
            {"ACTOR_MAX_NUM_SEQS": size * learner.groups_per_step},
        ),
        (
            learner.eval_steps > 0 and not (learner.eval_dataset or learner.eval_holdout), "warning",
            f"LEARNER_EVAL_STEPS={learner.eval_steps}, but there are no held-out questions",
            "nothing is evaluated, and no best model is kept",
            {"LEARNER_EVAL_HOLDOUT": 0.05},
        ),
    ]  # fmt: skip


def _of_place(settings: Settings, machine: Machine, gpu: bool) -> list[_Rule]:
    """Return the rules on the GPUs of an actor, if `gpu`, and on a run that begins anew."""
    needed = settings.actor.tensor_parallel_size * settings.actor.pipeline_parallel_size
    return [
        (
            gpu and needed > len(machine.gpus), "error",
            f"an actor uses {needed} GPUs, but this machine has {len(machine.gpus)}",
            "vLLM cannot start",
            {"ACTOR_TENSOR_PARALLEL_SIZE": 1, "ACTOR_PIPELINE_PARALLEL_SIZE": 1},
        ),
        (
            bool(settings.redis_url) and settings.learner.resume == "new", "error",
            "LEARNER_RESUME=new is set, and REDIS_URL too",
            "`penstock up` refuses to start: the old run is on that server too",
            {"LEARNER_RESUME": "auto"},
        ),
    ]  # fmt: skip
