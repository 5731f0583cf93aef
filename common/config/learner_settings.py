"""LEARNER_*: the training. Hyper-parameters have TRL's names where TRL has the thing."""

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from penstock.common.config.settings import Names, Numbers, PositiveNumbers, Section
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
    """Length of the run, size of its batches, and the seed."""

    seed: int = Field(42, ge=0, description="seed of question order, sampling and mini-batches")
    groups_per_step: int = Field(8, ge=1, description="questions (groups) per Update")
    max_steps: int = Field(0, ge=0, description="Updates of the run; 0: by num_train_epochs")
    num_train_epochs: float = Field(1.0, gt=0, description="passes over the questions")
    stall_timeout_s: float = Field(
        3600.0,
        gt=0,
        description="seconds that one task of the learner may take: an Update, a checkpoint, a download",
    )


class DataSettings(Section):
    """Data sets, evaluation, and how a question becomes a prompt."""

    dataset: Names = Field(
        [],
        description="training questions, names with commas: JSONL, Parquet, CSV, a saved folder, or a "
        "hub id as ID[:CONFIG][@REVISION]; #N after a name takes N rows",
    )
    dataset_split: str = Field("train", description="split of the training questions")
    dataset_weights: PositiveNumbers = Field([], description="weight of each data set; empty: by size")
    dataset_shuffle: bool = Field(True, description="shuffle the questions in each epoch")
    dataset_streaming: bool = Field(False, description="read rows when needed, not all at the start")
    eval_dataset: Names = Field([], description="held-out questions, named as in dataset")
    eval_split: str = Field("test", description="split of the held-out questions")
    eval_holdout: float = Field(
        0.0, ge=0, description="training questions to hold out: below 1 a share, else a number; 0: none"
    )
    eval_samples: int = Field(0, ge=0, description="held-out questions to use; 0: all")
    eval_steps: int = Field(0, ge=0, description="evaluate every N steps; 0: at start and end only")
    eval_num_generations: int = Field(1, ge=1, description="answers per held-out question (k of avg@k)")
    eval_temperature: float = Field(0.0, ge=0, description="sampling temperature; 0: greedy")
    evaluate_only: bool = Field(False, description="answer the held-out questions and train nothing")
    metric_for_best_model: str = Field(
        "", description="reward that decides whether an answer is right; empty: the first reward"
    )
    save_best_model: bool = Field(True, description="keep the model with the best evaluation")
    prompt_column: str = Field("", description="column of the question; empty: found by its name")
    solution_column: str = Field("", description="column of the right answer; empty: found by its name")
    system_prompt: str = Field(
        "", description="system message before each question, or a *.txt file that holds the message"
    )
    prompt_template: str = Field(
        "auto",
        description="chat: the tokenizer's template; none: the question alone; r1; qwen_r1; or a "
        "*.jinja file; auto: chat if the tokenizer has a template",
    )
    max_prompt_length: int = Field(512, ge=1, description="largest number of tokens of a prompt")
    overlong_prompts: Literal["drop", "truncate"] = Field(
        "drop", description="drop longer prompts, or truncate them, which keeps their end"
    )


class SamplingSettings(Section):
    """Sampling of completions by the actors."""

    num_generations: int = Field(8, ge=2, description="completions per question (group size)")
    max_completion_length: int = Field(512, ge=1, description="largest number of tokens of a completion")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; below 1 biases the ratio")
    top_k: int = Field(0, ge=0, description="sample from the k likeliest tokens; 0: all")
    min_p: float = Field(0.0, ge=0, le=1, description="least relative probability; above 0: biased")
    accept_sampling_bias: bool = Field(
        False, description="train although top_p, top_k or min_p bias the importance ratio"
    )


class RewardOptions(Section):
    """Parameters of the built-in rewards; see docs/rewards.md."""

    cosine_min_len_value_wrong: float = Field(-0.5, description="reward: wrong answer, 0 tokens")
    cosine_max_len_value_wrong: float = Field(0.0, description="reward: wrong answer, longest")
    cosine_min_len_value_correct: float = Field(1.0, description="reward: right answer, 0 tokens")
    cosine_max_len_value_correct: float = Field(0.5, description="reward: right answer, longest")
    cosine_max_len: int = Field(0, ge=0, description="tokens of the longest; 0: max_completion_length")
    repetition_n_grams: int = Field(3, ge=1, description="words of a phrase that counts as repeated")
    repetition_max_penalty: float = Field(-1.0, le=0, description="reward if all phrases repeat")
    soft_max_length: int = Field(
        0, ge=0, description="soft_overlong: tokens with reward -1; 0: max_completion_length"
    )
    soft_cache_length: int = Field(
        0, ge=0, description="soft_overlong: tokens over which the reward falls from 0 to -1"
    )
    target_language: str = Field("en", description="language_consistency: ISO 639-1, such as en or zh")


class RewardSettings(Section):
    """Rewards, and the advantages computed from them."""

    rewards: Names = Field(
        ["accuracy"],
        min_length=1,
        description="reward names with commas; own functions as file.py:function or "
        "package.module.function",
    )
    reward_weights: Numbers = Field([], description="weight of each reward, with commas; empty: all 1.0")
    filter_zero_std: bool = Field(True, description="do not train groups with equal rewards")
    max_resample_times: int = Field(
        3, ge=0, description="extra rounds of groups for one batch before a smaller batch is trained"
    )
    max_empty_updates: int = Field(
        3, ge=1, description="batches in a row without a usable group after which the run ends"
    )
    advantage_estimator: AdvantageEstimator = Field(
        "grpo", description="baseline: mean of the group, of its other completions, of the batch"
    )
    scale_rewards: ScaleRewards = Field(
        "group", description="divide advantages by this standard deviation; none: as in Dr. GRPO"
    )


class LossSettings(Section):
    """Loss of the policy; see docs/losses.md."""

    loss_type: LossType = Field("dapo", description="formula of the loss; see docs/losses.md")
    epsilon: float = Field(0.2, gt=0, description="lower clip range (dppo: probability difference)")
    epsilon_high: float = Field(
        0.28, gt=0, description="upper clip range of the ratio (dppo: of the probability difference)"
    )
    delta: float = Field(0.0, ge=0, description="dual clip: upper bound of the ratio; 0: none")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    beta: float = Field(0.0, ge=0, description="weight of the KL to the reference model; 0: no model")
    kl_estimator: KLEstimator = Field("k3", description="estimator of the KL to the reference model")
    mask_truncated_completions: bool = Field(
        False, description="leave completions that were cut at max_completion_length out of the loss"
    )


class LagSettings(Section):
    """Policy lag: the largest age of trained tokens, and the correction for it."""

    max_staleness: int = Field(1, ge=0, description="versions a trained token may lag; 0: synchronous")
    at_max_staleness: Literal["pace", "drop", "requeue"] = Field(
        "pace", description="groups about to exceed it: train first, drop, or sample again"
    )
    over_lag: Literal["mask", "set_aside"] = Field(
        "mask", description="group with some tokens over the limit: mask them, or skip the group"
    )
    decoupled_loss: bool = Field(
        False, description="clip against a proximal policy, computed when the batch is formed"
    )
    importance_sampling_correction: CorrectionLevel = Field(
        "token", description="level at which the ratio of current to behavior policy is corrected"
    )
    importance_sampling_mode: CorrectionMode = Field(
        "truncate", description="truncate at the cap; mask outside both bounds; clip to both"
    )
    importance_sampling_min: float = Field(
        0.5, ge=0, description="lower bound of the ratio, for mask and clip"
    )
    importance_sampling_cap: float = Field(2.0, gt=0, description="upper bound of the ratio")


class OptimizerSettings(Section):
    """Optimizer steps of an Update, and the learning rate."""

    num_iterations: int = Field(1, ge=1, description="passes over a batch (mu)")
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per pass")
    shuffle_mini_batch: bool = Field(True, description="form other mini-batches in each pass")
    learning_rate: float = Field(1e-6, gt=0, description="largest learning rate")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="schedule of the learning rate after the warm-up"
    )
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of linear and cosine")
    warmup_steps: int = Field(0, ge=0, description="Updates of linear warm-up")
    warmup_ratio: float = Field(0.0, ge=0, lt=1, description="linear warm-up as a share of all Updates")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW: decay of the second moment")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW: term that prevents division by zero")
    weight_decay: float = Field(0.0, ge=0, description="AdamW: weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="largest norm of unclipped gradients")
    max_nonfinite_steps: int = Field(
        3, ge=1, description="Updates in a row with NaN or infinity after which the run ends"
    )


class ReferenceSettings(Section):
    """Reference model of the KL term (beta above 0)."""

    ref_device: str = Field("", description="device of the reference model; empty: the policy's")
    sync_ref_model: bool = Field(False, description="mix the policy into the reference model")
    ref_model_sync_steps: int = Field(512, ge=1, description="Updates between two mixtures")
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1, description="share of the policy in a mixture")
    outer_iteration_steps: int = Field(
        0, ge=0, description="Updates until the policy becomes the reference model; 0: never"
    )


class ModelSettings(Section):
    """Model, precision, LoRA, and memory."""

    model: str = Field("", description="model to start from: a Hugging Face folder or a hub id")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="precision of the model")
    cast_lm_head_to_fp32: bool = Field(False, description="compute logits in float32 in any dtype")
    packing: bool = Field(True, description="put several sequences into a row; false: one per row")
    micro_batch_tokens: int = Field(
        16384, ge=1, description="tokens per row (forward pass); a longer sequence has its own row"
    )
    logprob_chunk: int = Field(128, ge=1, description="tokens whose logits are in memory at once")
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    use_liger_kernel: bool = Field(False, description="fused layers of liger-kernel (GPU)")
    zero_stage: Literal["auto", "0", "1", "2", "3"] = Field(
        "auto", description="DeepSpeed ZeRO; auto: 0 for float32, 1 for bfloat16 (fp32 masters)"
    )
    offload_optimizer: bool = Field(False, description="optimizer state in main memory (ZeRO 1-3)")
    offload_param: bool = Field(False, description="keep the parameters in main memory (ZeRO 3)")
    lora_rank: int = Field(0, ge=0, description="rank of the LoRA adapter; 0: train all weights")
    lora_alpha: int = Field(32, ge=1, description="LoRA scale times rank: the scale is alpha / rank")
    lora_target_modules: Names = Field(["all-linear"], description="modules that get an adapter")
    peak_tflops: float = Field(0.0, ge=0, description="TFLOPS of the device, for MFU; 0: by its name")


class OutputSettings(Section):
    """Checkpoints, journal, logged completions, and trackers."""

    save_steps: int = Field(50, ge=1, description="steps between two checkpoints")
    save_total_limit: int = Field(2, ge=2, description="checkpoints to keep")
    save_only_model: bool = Field(
        False, description="leave the optimizer's state out of checkpoints; a resumed run then differs"
    )
    journal_segment_mib: float = Field(64.0, gt=0, description="size of a journal file, in MiB")
    journal_retention: Literal["all", "resume"] = Field(
        "all", description="all: keep all for a replay; resume: delete what no resume needs"
    )
    log_completions: bool = Field(True, description="write completions/, a Parquet file per step")
    report_to: Names = Field(
        [],
        description="trackers beside metrics.jsonl, names with commas: wandb, tensorboard, or own ones "
        "as file.py:function or package.module.function",
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
        """Raise ValueError if the settings of data sets and evaluation contradict each other."""
        found, expected = len(self.dataset_weights), len(self.dataset)
        if self.dataset_weights and found != expected:
            raise ValueError(f"LEARNER_DATASET_WEIGHTS has {found} weights for {expected} data sets")
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
        """Raise ValueError if a reward or tracker is unknown, or a reward's parameters do not fit."""
        names = self.reward_names
        _check_functions("LEARNER_REWARDS", "reward", self.rewards, BUILT_IN)
        _check_functions("LEARNER_REPORT_TO", "tracker", self.report_to, TRACKERS)
        if self.metric_for_best_model not in ("", *names):
            raise ValueError(
                f"LEARNER_METRIC_FOR_BEST_MODEL={self.metric_for_best_model}: expected one of the "
                f"rewards, {', '.join(names)}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"LEARNER_REWARDS: two rewards have the same name: {', '.join(names)}")
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
        """Return the name of the reward that decides whether an answer is right."""
        return self.metric_for_best_model or self.reward_names[0]

    @property
    def reward_names(self) -> list[str]:
        """Return the names of the rewards in metrics and logs."""
        return [split_source(asked)[1] for asked in self.rewards]

    @model_validator(mode="after")
    def _weights_match_rewards(self) -> "LearnerSettings":
        """Raise ValueError unless there are no weights or one weight per reward."""
        found, expected = len(self.reward_weights), len(self.rewards)
        if self.reward_weights and found != expected:
            raise ValueError(f"LEARNER_REWARD_WEIGHTS has {found} weights for {expected} rewards")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "LearnerSettings":
        """Raise ValueError if bounds of loss, correction or learning rate exclude each other."""
        if self.importance_sampling_min > self.importance_sampling_cap:
            raise ValueError("LEARNER_IMPORTANCE_SAMPLING_MIN is above LEARNER_IMPORTANCE_SAMPLING_CAP")
        whole = self.importance_sampling_correction in ("sequence", "geometric")
        if whole and self.importance_sampling_mode == "clip" and not self.decoupled_loss:
            raise ValueError(
                "LEARNER_IMPORTANCE_SAMPLING_MODE=clip for whole sequences needs "
                "LEARNER_DECOUPLED_LOSS=true: raising the ratio of an unlikely sequence to the lower "
                "bound would multiply the gradients of its tokens without limit"
            )
        if self.delta and self.loss_type in ("cispo", "dppo"):
            raise ValueError(f"LEARNER_DELTA has no effect with LEARNER_LOSS_TYPE={self.loss_type}")
        if self.epsilon >= 1 and self.loss_type not in ("cispo", "dppo"):
            raise ValueError("LEARNER_EPSILON must be below 1: the ratio's lower bound is 1 - epsilon")
        if self.delta and self.delta <= 1 + self.epsilon_high:
            raise ValueError("LEARNER_DELTA must be above 1 + LEARNER_EPSILON_HIGH (or 0: none)")
        if self.min_lr > self.learning_rate:
            raise ValueError("LEARNER_MIN_LR is above LEARNER_LEARNING_RATE")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give LEARNER_WARMUP_STEPS or LEARNER_WARMUP_RATIO, not both")
        return self

    @model_validator(mode="after")
    def _a_bare_checkpoint_suffices(self) -> "LearnerSettings":
        """Raise ValueError if save_only_model would lose a state that a resumed run needs."""
        reference_changes = self.beta and (self.sync_ref_model or self.outer_iteration_steps)
        if self.save_only_model and (self.lora_rank or reference_changes):
            raise ValueError(
                "LEARNER_SAVE_ONLY_MODEL loses an adapter's base and a changed reference model: not "
                "with LEARNER_LORA_RANK, LEARNER_SYNC_REF_MODEL or LEARNER_OUTER_ITERATION_STEPS"
            )
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> "LearnerSettings":
        """Raise ValueError if ZeRO stage, dtype, offload or mini-batches do not fit together."""
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
        """Raise ValueError if a setting of the reference model would have no effect."""
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
        """Return the ZeRO stage: with "auto" 1 for bfloat16 (for fp32 master weights), else 0."""
        return int(self.dtype == "bfloat16") if self.zero_stage == "auto" else int(self.zero_stage)

    @property
    def credit(self) -> int:
        """Return how many train tickets may be open at once.

        Example: max_staleness 1, groups_per_step 8: 16 tickets.
        """
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
