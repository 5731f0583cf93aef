"""Values that mean something else in TRL 1.16.0 under the same name, or cost without effect. Pure.

docs/coming-from.md lists all such names. The learner logs a warning at its start for values that look as
if they were copied from there.
"""

from penstock.common.config.learner_settings import LearnerSettings

_Rule = tuple[bool, str]  # whether it applies, and the sentence

_GSPO_LARGEST = 0.01  # GSPO was published with 3e-4 and 4e-4, the others with 0.1 and more
_TRL_CAP = 3.0  # default of vllm_importance_sampling_clip_max
_LEAST_BETA = 1e-4  # papers that keep the term have 0.001 to 0.1
_TRL_CISPO = 5.0  # epsilon_high that TRL recommends with cispo


def misplaced_values(settings: LearnerSettings) -> list[str]:
    """Return a warning for each value that looks meant for TRL, where it means something else.

    There is also one for a beta that costs a reference model without effect. The list is empty if there
    is none; clip ranges come first, then corrections, weights, and the reference model. A default
    that does not fit what was set counts too: epsilon 0.1 alone leaves epsilon_high at 0.28. Example:
    loss_type cispo with epsilon_high 5 bounds the ratio at 6, in TRL at 5.
    """
    rules = [
        *_clip_ranges(settings), *_corrections(settings), *_weights(settings), *_reference(settings),
        *_idle(settings),
    ]  # fmt: skip
    return [text for applies, text in rules if applies]


def _clip_ranges(settings: LearnerSettings) -> list[_Rule]:
    """Return all rules on the clip ranges, each as whether the rule applies and its warning.

    The rules: epsilon was set with cispo or sapo, or epsilon_high with sapo, which ignore them; level
    "token" was set with gspo; cispo has an epsilon_high below 1 or of 5; a range for the ratio of
    sequences is 0.01 or more. The last two are for ratios of tokens, but not for cispo, dppo and sapo:
    epsilon is below 0.01; or epsilon was set, and epsilon_high was not.
    """
    loss, low, high = settings.loss_type, settings.epsilon, settings.epsilon_high
    level = settings.importance_sampling_level
    of_sequence = loss == "gspo" or level == "sequence"
    given = settings.model_fields_set
    of_token = not of_sequence and loss not in ("cispo", "dppo", "sapo")
    low_alone = "epsilon" in given and "epsilon_high" not in given
    return [
        (
            (loss in ("cispo", "sapo") and "epsilon" in given)
            or (loss == "sapo" and "epsilon_high" in given),
            f"LEARNER_EPSILON and, with sapo, LEARNER_EPSILON_HIGH have no effect with {loss}.",
        ),
        (
            loss == "gspo" and level == "token" and "importance_sampling_level" in given,
            "LEARNER_IMPORTANCE_SAMPLING_LEVEL=token has no effect: gspo has one ratio per sequence.",
        ),
        (
            loss == "cispo" and (high < 1 or high == _TRL_CISPO),
            f"LEARNER_EPSILON_HIGH={high:g} with cispo bounds the ratio at {1 + high:g}. TRL's "
            "epsilon_high is the bound itself: its 5.0 is LEARNER_EPSILON_HIGH=4 here.",
        ),
        (
            of_sequence and loss not in ("cispo", "sapo") and max(low, high) >= _GSPO_LARGEST,
            f"LEARNER_EPSILON={low:g} and LEARNER_EPSILON_HIGH={high:g} clip hardly any sequence with "
            "gspo's ratio, a mean over tokens. It was published with 0.0003 and 0.0004.",
        ),
        (
            of_token and low < _GSPO_LARGEST,
            f"LEARNER_EPSILON={low:g} is a range for gspo. With {loss} it clips nearly every token "
            "that changed.",
        ),
        (
            of_token and low_alone,
            f"LEARNER_EPSILON={low:g} is set and LEARNER_EPSILON_HIGH is not: it stays {high:g}. In TRL "
            "it would be epsilon.",
        ),
    ]


def _corrections(settings: LearnerSettings) -> list[_Rule]:
    """Return all rules on the correction of the ratio, each as whether the rule applies and its warning.

    The rules: a cap of 3 with level "token" and mode truncate; level "sequence" and mode mask without a
    lower bound that was set; a cap below 1, unless the correction is off.
    """
    level, mode = settings.importance_sampling_correction, settings.importance_sampling_mode
    cap, low = settings.importance_sampling_cap, settings.importance_sampling_min
    return [
        (
            cap == _TRL_CAP and level == "token" and mode == "truncate",
            f"LEARNER_IMPORTANCE_SAMPLING_CAP={cap:g} is TRL's bound of sequence_mask. That is "
            "LEARNER_IMPORTANCE_SAMPLING_CORRECTION=sequence, _MODE=mask and _MIN=0 here.",
        ),
        (
            level == "sequence" and mode == "mask"
            and "importance_sampling_min" not in settings.model_fields_set,
            f"LEARNER_IMPORTANCE_SAMPLING_MIN is not set, so sequences with a ratio below {low:g} are "
            "masked. TRL has no lower bound, which is 0 here.",
        ),
        (
            cap < 1 and level != "off",
            f"LEARNER_IMPORTANCE_SAMPLING_CAP={cap:g} changes tokens whose policy did not change: it "
            "bounds the ratio itself, not its distance from 1.",
        ),
    ]  # fmt: skip


def _weights(settings: LearnerSettings) -> list[_Rule]:
    """Return all rules on weights of the loss's terms, each as whether the rule applies and its warning.

    The rules: beta of 0.5 or more; an entropy bonus, constant or adaptive, with grpo, gspo or dr_grpo.
    """
    loss, beta = settings.loss_type, settings.beta
    bonus = bool(settings.entropy_coef) or settings.use_adaptive_entropy
    return [
        (
            beta >= 0.5,
            f"LEARNER_BETA={beta:g} is the weight of the KL to the reference model, usually 0.001 to "
            "0.1. AdamW's betas are LEARNER_ADAM_BETA1 and LEARNER_ADAM_BETA2.",
        ),
        (
            bonus and loss in ("grpo", "gspo", "dr_grpo"),
            f"The entropy bonus is weighted as {loss} weights the loss. TRL's bonus is the mean over "
            "all tokens, as here with bnpo and dapo.",
        ),
    ]


def _reference(settings: LearnerSettings) -> list[_Rule]:
    """Return all rules on a beta above 0 without effect, each as whether it applies and its warning.

    The rules: nothing is trained; the reference is always the policy itself; beta is below 0.0001.
    """
    beta, same, idle = settings.beta, _is_own_reference(settings), settings.evaluate_only
    given = f"LEARNER_BETA={beta:g} needs a reference model and a forward pass of it per Update"
    return [
        (beta > 0 and idle, f"{given}, and LEARNER_EVALUATE_ONLY trains nothing: leave it out."),
        (
            beta > 0 and same and not idle,
            f"{given} for a term that is 0: the reference is the policy itself at the one optimizer "
            "step of each Update. Leave it out, or sync less often.",
        ),
        (
            0 < beta < _LEAST_BETA and not (same or idle),
            f"{given} for a term that hardly counts: usual are 0.001 to 0.1, and 0, which needs none, "
            "with rewards that can be verified.",
        ),
    ]


def _idle(settings: LearnerSettings) -> list[_Rule]:
    """Return a rule for each setting that another one switches off, with its warning if changed."""
    idle = [
        (settings.lr_scheduler_type == "constant", ("min_lr",), "LR_SCHEDULER_TYPE is constant"),
        (not settings.lora_rank, ("lora_alpha", "lora_target_modules"), "LORA_RANK is 0"),
        (not settings.beta, ("kl_estimator",), "BETA is 0"),
        (
            not (settings.eval_dataset or settings.eval_holdout), ("eval_steps", "eval_samples"),
            "no held-out questions are named (LEARNER_EVAL_DATASET, LEARNER_EVAL_HOLDOUT)",
        ),
    ]  # fmt: skip
    return [
        (
            off and getattr(settings, name) != LearnerSettings.model_fields[name].default,
            f"LEARNER_{name.upper()} has no effect: {why}.",
        )
        for off, names, why in idle
        for name in names
    ]


def _is_own_reference(settings: LearnerSettings) -> bool:
    """Return whether the KL to the reference has no gradient in any Update.

    That holds if the reference becomes the policy before each Update of a single optimizer step, with
    the estimators k2 and k3.
    """
    mixed = settings.sync_ref_model and settings.ref_model_mixup_alpha == 1
    copied = settings.outer_iteration_steps == 1 or (mixed and settings.ref_model_sync_steps == 1)
    single = settings.num_iterations * settings.num_mini_batches == 1
    return single and copied and settings.kl_estimator != "k1"
