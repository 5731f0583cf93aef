"""LEARNER_*: the training. Hyper-parameters have TRL's names where TRL has the thing."""

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from penstock.common.config.settings import Names, Numbers, Section
from penstock.common.own_code import split_source
from penstock.common.wire.reward_spec import BUILT_IN, COLUMNS, LANGUAGES

TRACKERS = ("wandb", "tensorboard")
"""The trackers that come with Penstock."""

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce_plus_plus"]
ScaleRewards = Literal["group", "batch", "none"]
CorrectionLevel = Literal["off", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask", "clip"]
KLEstimator = Literal["k1", "k2", "k3"]


class TrainingSettings(Section):
    """How long the run is, how large its batches are, and the seed."""

    seed: int = Field(42, ge=0, description="seed of the data order, the sampling, the mini-batches")
    groups_per_step: int = Field(8, ge=1, description="prompts per batch")
    max_steps: int = Field(0, ge=0, description="Updates to make; 0: by num_train_epochs")
    num_train_epochs: float = Field(1.0, gt=0, description="passes over the questions")
    stall_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="limit for one thing it does: an Update, a checkpoint, fetching a model",
    )


class DataSettings(Section):
    """What is asked: the data sets and how a question becomes a prompt."""

    dataset: Names = Field(
        [],
        description="training questions, with commas: JSONL, Parquet, CSV, a saved folder, or a hub id "
        "as ID[:CONFIG][@REVISION]; #N behind any takes N rows",
    )
    dataset_split: str = Field("train", description="split of the training questions")
    dataset_weights: Numbers = Field([], description="one per data set; empty: by their sizes")
    dataset_shuffle: bool = Field(True, description="ask in another order in each epoch")
    dataset_streaming: bool = Field(False, description="read the data set as it is needed, not whole")
    eval_dataset: Names = Field([], description="held-out questions, named in the same way")
    eval_split: str = Field("test", description="split of the held-out questions")
    eval_holdout: float = Field(
        0.0, ge=0, description="hold out training questions: a share below 1, or a number; 0: none"
    )
    eval_samples: int = Field(0, ge=0, description="held-out questions used; 0 means all")
    eval_steps: int = Field(0, ge=0, description="evaluate every so many steps; 0: start and end")
    eval_num_generations: int = Field(1, ge=1, description="answers per held-out question (k)")
    eval_temperature: float = Field(0.0, ge=0, description="of the answers; 0: greedy")
    evaluate_only: bool = Field(False, description="answer the held-out questions, train nothing")
    metric_for_best_model: str = Field(
        "", description="the reward that says whether an answer is right; empty: the first"
    )
    save_best_model: bool = Field(True, description="keep the model that did best on held-out questions")
    prompt_column: str = Field("", description="column with the question; empty: recognised")
    solution_column: str = Field("", description="column with the gold answer; empty: recognised")
    system_prompt: str = Field(
        "", description="system message put before each question; or a file *.txt with it"
    )
    prompt_template: str = Field(
        "auto",
        description="chat: the tokenizer's template; none: the bare question; r1, qwen_r1; or a file "
        "*.jinja; auto: chat if there is one",
    )
    max_prompt_length: int = Field(512, ge=1, description="tokens of a prompt at most")
    overlong_prompts: Literal["drop", "truncate"] = Field(
        "drop", description="what becomes of longer ones; truncate keeps their end"
    )


class SamplingSettings(Section):
    """How the actors sample; rides on every ticket."""

    num_generations: int = Field(8, ge=2, description="completions per prompt")
    max_completion_length: int = Field(512, ge=1, description="tokens per completion")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="below 1 the importance ratio is biased")
    top_k: int = Field(0, ge=0, description="0 means all; else the importance ratio is biased")
    min_p: float = Field(0.0, ge=0, le=1, description="above 0 the importance ratio is biased")
    accept_sampling_bias: bool = Field(
        False, description="train although top_p, top_k or min_p bias the importance ratio"
    )


class RewardOptions(Section):
    """What the built-in rewards can be told; see docs/rewards.md."""

    cosine_min_len_value_wrong: float = Field(-0.5, description="cosine: wrong, length 0")
    cosine_max_len_value_wrong: float = Field(0.0, description="cosine: wrong, cosine_max_len or more")
    cosine_min_len_value_correct: float = Field(1.0, description="cosine: right, length 0")
    cosine_max_len_value_correct: float = Field(0.5, description="cosine: right, cosine_max_len or more")
    cosine_max_len: int = Field(0, ge=0, description="in tokens; 0: max_completion_length")
    repetition_n_grams: int = Field(3, ge=1, description="words in what is counted as repeated")
    repetition_max_penalty: float = Field(-1.0, le=0, description="repetition: all words the same")
    soft_max_length: int = Field(
        0, ge=0, description="soft_overlong is -1 from here on, in tokens; 0: max_completion_length"
    )
    soft_cache_length: int = Field(
        0, ge=0, description="soft_overlong falls from 0 to -1 over so many tokens; no default"
    )
    target_language: str = Field("en", description="language_consistency: ISO 639-1, such as en or zh")


class RewardSettings(Section):
    """What is rewarded, and what a reward becomes."""

    rewards: Names = Field(
        ["accuracy"],
        min_length=1,
        description="names with commas; own functions as file.py:function or package.module.function",
    )
    reward_weights: Numbers = Field([], description="one per reward; empty: all 1.0")
    filter_zero_std: bool = Field(True, description="groups without spread are not trained")
    max_resample_times: int = Field(
        3, ge=0, description="extra rounds of groups for one batch before it is taken smaller"
    )
    max_empty_updates: int = Field(
        3, ge=1, description="batches in a row without one usable group, after which the run ends"
    )
    advantage_estimator: AdvantageEstimator = Field(
        "grpo", description="baseline: the group's mean, the group's others, the batch's mean"
    )
    scale_rewards: ScaleRewards = Field(
        "group", description="divide advantages by the standard deviation of this; none: Dr. GRPO"
    )


class LossSettings(Section):
    """The loss; see docs/losses.md."""

    loss_type: LossType = Field("dapo", description="see docs/losses.md")
    epsilon: float = Field(0.2, gt=0, description="clip range below (dppo: probability difference)")
    epsilon_high: float = Field(
        0.28, gt=0, description="clip range above (dppo: probability difference)"
    )
    delta: float = Field(0.0, ge=0, description="dual clip: bound of the ratio; 0: none")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    beta: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0: none is loaded")
    kl_estimator: KLEstimator = Field("k3", description="estimator of the KL to the reference")
    mask_truncated_completions: bool = Field(
        False, description="completions cut at max_completion_length leave the loss"
    )


class LagSettings(Section):
    """Policy lag: how old a trained token may be, and what the loss makes of it."""

    max_staleness: int = Field(1, ge=0, description="versions a trained token may lag; 0: synchronous")
    at_max_staleness: Literal["pace", "drop", "requeue"] = Field(
        "pace", description="groups about to exceed it: trained first, given up, or asked again"
    )
    over_lag: Literal["mask", "set_aside"] = Field(
        "mask", description="a group with some tokens over max_staleness: mask these, or none is trained"
    )
    decoupled_loss: bool = Field(
        False, description="clip against a proximal policy, recomputed when the batch is formed"
    )
    importance_sampling_correction: CorrectionLevel = Field(
        "token", description="level of the current-to-behaviour ratio that is bounded"
    )
    importance_sampling_mode: CorrectionMode = Field(
        "truncate", description="above the cap: cut; outside the bounds: masked; cut at both bounds"
    )
    importance_sampling_min: float = Field(
        0.5, ge=0, description="lower bound of the corrected ratio, for mask and clip"
    )
    importance_sampling_cap: float = Field(2.0, gt=0, description="upper bound of the corrected ratio")


class OptimizerSettings(Section):
    """The optimizer steps of an Update."""

    num_iterations: int = Field(1, ge=1, description="passes over a batch (mu)")
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per pass")
    shuffle_mini_batch: bool = Field(True, description="draw the mini-batches anew in each pass")
    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate goes after the warm-up"
    )
    min_lr: float = Field(0.0, ge=0, description="where linear and cosine end")
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="the same as a share of all Updates")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="of AdamW")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="of AdamW")
    adam_epsilon: float = Field(1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    max_nonfinite_steps: int = Field(
        3, ge=1, description="end the run after so many Updates in a row with NaN or infinity"
    )


class ReferenceSettings(Section):
    """The reference policy of the KL term (beta above 0)."""

    ref_device: str = Field("", description="device of the reference model; empty: the policy's")
    sync_ref_model: bool = Field(False, description="mix the policy into the reference now and then")
    ref_model_sync_steps: int = Field(512, ge=1, description="Updates between two of these")
    ref_model_mixup_alpha: float = Field(
        0.6, gt=0, le=1, description="share of the policy in the mixture"
    )
    outer_iteration_steps: int = Field(
        0, ge=0, description="start over with policy as reference and a new optimizer; 0: never"
    )


class ModelSettings(Section):
    """The model, its precision, and how it fits into memory."""

    model: str = Field("", description="policy to start from: a folder or a hub id")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="precision of the model")
    cast_lm_head_to_fp32: bool = Field(False, description="logits in float32 whatever the dtype")
    packing: bool = Field(True, description="many sequences per row; else one")
    micro_batch_tokens: int = Field(
        16384, ge=1, description="tokens per row, thus per forward pass; a longer sequence has its own"
    )
    logprob_chunk: int = Field(128, ge=1, description="tokens whose logits exist at once")
    gradient_checkpointing: bool = Field(False, description="compute activations twice, keep few")
    use_liger_kernel: bool = Field(False, description="fused layers of liger-kernel (GPU)")
    zero_stage: Literal["auto", "0", "1", "2", "3"] = Field(
        "auto", description="of DeepSpeed; auto: 0 for float32, 1 for bfloat16 (fp32 master weights)"
    )
    offload_optimizer: bool = Field(False, description="optimizer state in main memory (ZeRO 1-3)")
    offload_param: bool = Field(False, description="parameters in main memory (ZeRO 3)")
    lora_rank: int = Field(0, ge=0, description="train a LoRA adapter of this rank; 0: all weights")
    lora_alpha: int = Field(32, ge=1, description="LoRA's scale is alpha / rank")
    lora_target_modules: Names = Field(["all-linear"], description="modules that get an adapter")
    peak_tflops: float = Field(0.0, ge=0, description="of the device, for perf/mfu; 0: by its name")


class OutputSettings(Section):
    """What is kept and reported."""

    save_steps: int = Field(50, ge=1, description="checkpoint every so many steps")
    save_total_limit: int = Field(2, ge=2, description="checkpoints kept")
    save_only_model: bool = Field(
        False, description="no optimizer state in checkpoints; resuming is then not exact"
    )
    journal_segment_mib: float = Field(64.0, gt=0, description="size of the journal's files, in MiB")
    journal_retention: Literal["all", "resume"] = Field(
        "all", description="all: the run can be replayed; resume: what lies before the checkpoints goes"
    )
    log_completions: bool = Field(True, description="write completions/, a Parquet file per step")
    report_to: Names = Field(
        [],
        description="beside metrics.jsonl, names with commas: wandb, tensorboard, or own trackers as "
        "file.py:function or package.module.function",
    )


class LearnerSettings(
    OutputSettings,
    ModelSettings,
    ReferenceSettings,
    OptimizerSettings,
    LagSettings,
    LossSettings,
    RewardOptions,
    RewardSettings,
    SamplingSettings,
    DataSettings,
    TrainingSettings,
):
    """LEARNER_*: the training; hyper-parameters have TRL's names."""

    parts: ClassVar = {
        "training": TrainingSettings,
        "data": DataSettings,
        "sampling": SamplingSettings,
        "rewards": RewardSettings,
        "reward-options": RewardOptions,
        "loss": LossSettings,
        "lag": LagSettings,
        "optimizer": OptimizerSettings,
        "reference": ReferenceSettings,
        "model": ModelSettings,
        "output": OutputSettings,
    }

    @model_validator(mode="after")
    def _data_sets_fit(self) -> "LearnerSettings":
        found, expected = len(self.dataset_weights), len(self.dataset)
        if self.dataset_weights and found != expected:
            raise ValueError(f"LEARNER_DATASET_WEIGHTS has {found} weights for {expected} data sets")
        if any(weight <= 0 for weight in self.dataset_weights):
            raise ValueError("LEARNER_DATASET_WEIGHTS: a weight is not above 0")
        if self.eval_num_generations > 1 and not self.eval_temperature:
            raise ValueError(
                "LEARNER_EVAL_NUM_GENERATIONS above 1 needs LEARNER_EVAL_TEMPERATURE above 0: greedy "
                "answers are all the same"
            )
        if self.evaluate_only and not (self.eval_dataset or self.eval_holdout):
            raise ValueError("LEARNER_EVALUATE_ONLY needs LEARNER_EVAL_DATASET")
        if self.eval_dataset and self.eval_holdout:
            raise ValueError("give LEARNER_EVAL_DATASET or LEARNER_EVAL_HOLDOUT, not both")
        return self

    @model_validator(mode="after")
    def _rewards_are_known(self) -> "LearnerSettings":
        names = self.reward_names
        _check_functions("LEARNER_REWARDS", "reward", self.rewards, BUILT_IN)
        _check_functions("LEARNER_REPORT_TO", "tracker", self.report_to, TRACKERS)
        if self.metric_for_best_model not in ("", *names):
            raise ValueError(
                f"LEARNER_METRIC_FOR_BEST_MODEL={self.metric_for_best_model}: expected one of the "
                f"rewards, {', '.join(names)}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"LEARNER_REWARDS: two rewards have one name: {', '.join(names)}")
        if taken := set(names) & set(COLUMNS):
            raise ValueError(
                f"LEARNER_REWARDS: a reward cannot be called {', '.join(sorted(taken))}: the table of "
                "completions has a column of that name beside one per reward; rename the function"
            )
        if "language_consistency" in names and self.target_language not in LANGUAGES:
            raise ValueError(
                f"LEARNER_TARGET_LANGUAGE: {self.target_language!r} is not known; expected one of "
                f"{', '.join(sorted(LANGUAGES))}"
            )
        if "soft_overlong" in names and not self.soft_cache_length:
            raise ValueError(
                "LEARNER_REWARDS has soft_overlong, so set LEARNER_SOFT_CACHE_LENGTH: the tokens over "
                "which the punishment grows (the DAPO recipe: 819 of 4096)"
            )
        longest = self.soft_max_length or self.max_completion_length
        if self.soft_cache_length > longest:
            raise ValueError(
                f"LEARNER_SOFT_CACHE_LENGTH={self.soft_cache_length} is more than the {longest} tokens "
                "of LEARNER_SOFT_MAX_LENGTH (by default the longest completion): even an empty one "
                "would be punished"
            )
        return self

    @property
    def main_reward(self) -> str:
        """The reward that says whether an answer is right."""
        return self.metric_for_best_model or self.reward_names[0]

    @property
    def reward_names(self) -> list[str]:
        """What the rewards are called in metrics and logs."""
        return [split_source(asked)[1] for asked in self.rewards]

    @model_validator(mode="after")
    def _weights_match_rewards(self) -> "LearnerSettings":
        found, expected = len(self.reward_weights), len(self.rewards)
        if self.reward_weights and found != expected:
            raise ValueError(f"LEARNER_REWARD_WEIGHTS has {found} weights for {expected} rewards")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "LearnerSettings":
        if self.importance_sampling_min > self.importance_sampling_cap:
            raise ValueError(
                "LEARNER_IMPORTANCE_SAMPLING_MIN lies above LEARNER_IMPORTANCE_SAMPLING_CAP"
            )
        whole = self.importance_sampling_correction in ("sequence", "geometric")
        if whole and self.importance_sampling_mode == "clip" and not self.decoupled_loss:
            raise ValueError(
                "LEARNER_IMPORTANCE_SAMPLING_MODE=clip for whole sequences needs "
                "LEARNER_DECOUPLED_LOSS=true: lifting an unlikely sequence to the lower bound would "
                "multiply its tokens without limit"
            )
        if self.delta and self.loss_type in ("cispo", "dppo"):
            raise ValueError(f"LEARNER_DELTA does nothing with LEARNER_LOSS_TYPE={self.loss_type}")
        if self.epsilon >= 1 and self.loss_type not in ("cispo", "dppo"):
            raise ValueError("LEARNER_EPSILON must be below 1: the ratio's lower bound is 1 - epsilon")
        if self.delta and self.delta <= 1 + self.epsilon_high:
            raise ValueError("LEARNER_DELTA must be above 1 + LEARNER_EPSILON_HIGH (or 0: none)")
        if self.min_lr > self.learning_rate:
            raise ValueError("LEARNER_MIN_LR lies above LEARNER_LEARNING_RATE")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give LEARNER_WARMUP_STEPS or LEARNER_WARMUP_RATIO, not both")
        return self

    @model_validator(mode="after")
    def _a_bare_checkpoint_suffices(self) -> "LearnerSettings":
        reference_changes = self.beta and (self.sync_ref_model or self.outer_iteration_steps)
        if self.save_only_model and (self.lora_rank or reference_changes):
            raise ValueError(
                "LEARNER_SAVE_ONLY_MODEL loses an adapter's base and a changed reference model: not "
                "with LEARNER_LORA_RANK, LEARNER_SYNC_REF_MODEL or LEARNER_OUTER_ITERATION_STEPS"
            )
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> "LearnerSettings":
        stage = self.resolved_zero_stage
        if self.dtype == "bfloat16" and stage == 0:
            raise ValueError(
                "LEARNER_ZERO_STAGE=0 with LEARNER_DTYPE=bfloat16 would train without fp32 master "
                "weights, and small steps would be lost to rounding: use stage 1 (or auto), or float32"
            )
        if self.offload_optimizer and stage == 0:
            raise ValueError("LEARNER_OFFLOAD_OPTIMIZER needs LEARNER_ZERO_STAGE 1, 2 or 3")
        if self.offload_param and stage < 3:
            raise ValueError("LEARNER_OFFLOAD_PARAM needs LEARNER_ZERO_STAGE=3")
        completions = self.groups_per_step * self.num_generations
        if self.num_mini_batches > completions:
            raise ValueError(
                f"LEARNER_NUM_MINI_BATCHES={self.num_mini_batches}: expected at most {completions}, "
                "the completions of a batch"
            )
        return self

    @model_validator(mode="after")
    def _the_reference_is_used(self) -> "LearnerSettings":
        if self.lora_rank and self.beta and (self.sync_ref_model or self.outer_iteration_steps):
            raise ValueError(
                "with LoRA the reference is the base model, which does not change: leave "
                "LEARNER_SYNC_REF_MODEL and LEARNER_OUTER_ITERATION_STEPS off, or train all weights"
            )
        if self.ref_device and (self.lora_rank or not self.beta):
            raise ValueError("LEARNER_REF_DEVICE: there is no reference model (LEARNER_BETA=0, or LoRA)")
        if self.sync_ref_model and not self.beta:
            raise ValueError("LEARNER_SYNC_REF_MODEL: there is no reference model (LEARNER_BETA=0)")
        return self

    @property
    def resolved_zero_stage(self) -> int:
        """The stage that is used: bf16 needs 1 for its fp32 master weights."""
        return int(self.dtype == "bfloat16") if self.zero_stage == "auto" else int(self.zero_stage)

    @property
    def credit(self) -> int:
        """Train tickets that may be outstanding at once."""
        return (self.max_staleness + 1) * self.groups_per_step


def _check_functions(variable: str, kind: str, asked: Iterable[str], built_in: Iterable[str]) -> None:
    """Raise ValueError unless each text is one of `built_in` or has the form of an own function."""
    known = tuple(built_in)
    for text in asked:
        source, name = split_source(text)
        if not name.isidentifier() or text.endswith(".py"):
            raise ValueError(f"{variable}: {text!r} names no function")
        if not source and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(
                f"{variable}: there is no {kind} {name!r}: {hint} (own functions: "
                "file.py:function or package.module.function)"
            )
