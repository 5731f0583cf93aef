"""LEARNER_*: the training. Hyper-parameters have TRL's names where TRL has the thing."""

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, field_validator, model_validator

from penstock.common.config.device import resolve_dtype, resolve_logprob_chunk
from penstock.common.config.settings import JsonMap, Names, Numbers, PositiveNumbers, Section, setting
from penstock.common.errors import MalformedMessage
from penstock.common.files.reading import at_home
from penstock.common.own_code import split_source
from penstock.common.text import did_you_mean
from penstock.common.wire.generation import check_generation, sampling_options
from penstock.common.wire.limits import (
    HIGHEST_REWARD,
    HIGHEST_TEMPERATURE,
    LARGEST_INT32,
    LONGEST_NAME,
    LOWEST_TEMPERATURE,
    MOST_ADAPTER_RANK,
    MOST_COMPLETIONS,
    MOST_NAMES,
    MOST_SEQUENCES,
)
from penstock.common.wire.reward_spec import (
    ACCURACY_LIKE,
    BUILT_IN,
    COLUMNS,
    LANGUAGES,
    Aggregation,
    split_kind,
)

TRACKERS = ("wandb", "tensorboard")
"""The trackers that come with Penstock."""

ACCEPTABLE = ("model", "tokenizer", "dataset")
"""What LEARNER_ACCEPT_CHANGED may name."""

_REWARD = {"ge": -HIGHEST_REWARD, "le": HIGHEST_REWARD}

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "sapo"]
RatioLevel = Literal["token", "sequence"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce_plus_plus"]
ScaleRewards = Literal["group", "batch", "none"]
CorrectionLevel = Literal["off", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask", "clip"]
KLEstimator = Literal["k1", "k2", "k3"]


def _refuse_truth_value(value: object) -> object:
    """Return `value` unchanged. Raise ValueError for True, False, and "true" and "false" in any case.

    TRL's scale_rewards may be a truth value; here it is "group", "batch" or "none".
    """
    if str(value).lower() in ("true", "false"):
        expected = "expected group (TRL's true), batch or none (TRL's false)"
        raise ValueError(f"LEARNER_SCALE_REWARDS is {value}, {expected}: set one of these")
    return value


def _check_resume(value: str) -> str:
    """Return `value` unchanged. Raise ValueError unless it is auto, must, new or may be a path."""
    if value not in ("auto", "must", "new") and "/" not in value:
        raise ValueError(
            f"LEARNER_RESUME is {value}, expected auto, must, new, or a checkpoint's folder, such as "
            "runs/first/checkpoints/000001-00000050: set one of these"
        )
    return value


class TrainingSettings(Section):
    """Length of the run, size of its batches, and the seed."""

    seed: int = setting(42, "seed of question order, sampling and mini-batches", ge=0)
    groups_per_step: int = setting(8, "questions (groups) per Update", ge=1, le=LARGEST_INT32)
    max_steps: int = setting(0, "Updates of the run; 0: by num_train_epochs", ge=0)
    num_train_epochs: float = setting(1.0, "passes over the questions", gt=0)
    resume: Annotated[str, AfterValidator(_check_resume)] = setting(
        "auto",
        "must: refuse to start without a run to resume; new: `penstock up` moves an old run away; a "
        "checkpoint's path: it then begins from there",
    )
    accept_changed: Names = setting(
        [], "resume a run although these are others than at its start: model, tokenizer, dataset"
    )
    stall_timeout_s: float = setting(
        3600.0, "seconds that a task (an Update, a checkpoint, a download) may take", gt=0
    )

    @field_validator("accept_changed")
    @classmethod
    def _are_acceptable(cls, names: list[str]) -> list[str]:
        """Return `names`. Raise ValueError, with the nearest name, if one cannot be accepted."""
        for name in names:
            if name not in ACCEPTABLE:
                hint = did_you_mean(name, ACCEPTABLE, f"expected {', '.join(ACCEPTABLE)}")
                raise ValueError(f"{name!r} cannot be accepted: {hint}")
        return names


class DataSettings(Section):
    """Data sets, evaluation, and how a question becomes a prompt."""

    dataset: Names = setting(
        [],
        "training questions, names with commas: files (JSON lines, CSV, Parquet, Arrow; parts/*.jsonl), "
        "a saved folder, or a hub id as ID[:CONFIG][@REVISION]; #N takes N rows; see docs/data.md",
    )
    dataset_split: str = setting("train", "split of the training questions")
    dataset_weights: PositiveNumbers = setting([], "weight of each data set; empty: by size")
    dataset_shuffle: bool = setting(True, "shuffle the questions in each epoch")
    dataset_streaming: bool = setting(False, "read rows when needed, not all at the start")
    eval_dataset: Names = setting([], "held-out questions, named as in dataset")
    eval_split: str = setting("test", "split of the held-out questions")
    eval_holdout: float = setting(
        0.0, "share (below 1) or number of training questions held out; 0: none", ge=0
    )
    eval_samples: int = setting(0, "held-out questions to use; 0: all", ge=0)
    eval_steps: int = setting(0, "evaluate every N steps; 0: at start and end only", ge=0)
    eval_num_generations: int = setting(
        1, "answers per held-out question (k of avg@k)", ge=1, le=MOST_COMPLETIONS
    )
    eval_temperature: float = setting(
        0.0, "sampling temperature; 0: greedy", ge=0, le=HIGHEST_TEMPERATURE
    )
    evaluate_only: bool = setting(False, "answer the held-out questions and train nothing")
    metric_for_best_model: str = setting(
        "", "reward that says if an answer is right; empty: the first of accuracy's kind, else the first"
    )
    eval_threshold: Literal["auto"] | float = setting(
        "auto",
        "value of that reward from which an answer is right; auto: 1, and none for judges, reward "
        "models and built-in rewards of form or length",
    )
    save_best_model: bool = setting(True, "keep the model with the best evaluation")
    prompt_column: str = setting("", "column of the question; empty: found by its name")
    solution_column: str = setting("", "column of the right answer; empty: found by its name")
    system_prompt: str = setting("", "system message before each question, or a *.txt file with it")
    prompt_template: str = setting(
        "auto",
        "chat: the tokenizer's template; none: the question alone; r1; qwen_r1; or a "
        "*.jinja file; auto: chat if the tokenizer has a template",
    )
    chat_template_kwargs: JsonMap = setting(
        {}, 'variables of the chat template, as JSON, such as {"enable_thinking": false}'
    )
    renderer: str = setting(
        "auto",
        "format of the library renderers that adds turns, such as qwen3; none: the chat template; "
        "auto: by the model's hub id",
    )
    max_prompt_length: int = setting(512, "largest number of tokens of a prompt", ge=1, le=LARGEST_INT32)
    overlong_prompts: Literal["drop", "truncate"] = setting(
        "drop", "drop longer prompts, or truncate them, which keeps their end"
    )


class SamplingSettings(Section):
    """Sampling of completions by the actors."""

    num_generations: int = setting(8, "completions per question (group size)", ge=2, le=MOST_COMPLETIONS)
    max_completion_length: int = setting(
        512, "largest number of tokens of a completion", ge=1, le=LARGEST_INT32
    )
    max_group_mib: int = setting(256, "most MiB of a group's rollouts; a larger one dies", ge=1, le=4096)
    temperature: float = setting(
        1.0, "sampling temperature", ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE
    )
    top_p: float = setting(1.0, "nucleus sampling; below 1 biases the ratio", gt=0, le=1)
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: all", ge=0, le=LARGEST_INT32)
    min_p: float = setting(0.0, "least relative probability; above 0: biased", ge=0, le=1)
    generation_kwargs: JsonMap = setting(
        {}, "JSON with stop, repetition_penalty or structured_outputs; see docs/training.md"
    )
    accept_sampling_bias: bool = setting(False, "train though the sampling biases the ratio")


class RewardOptions(Section):
    """Parameters of the built-in rewards; see docs/rewards.md."""

    cosine_min_len_value_wrong: float = setting(-0.5, "reward: wrong answer, 0 tokens", **_REWARD)
    cosine_max_len_value_wrong: float = setting(0.0, "reward: wrong answer, longest", **_REWARD)
    cosine_min_len_value_correct: float = setting(1.0, "reward: right answer, 0 tokens", **_REWARD)
    cosine_max_len_value_correct: float = setting(0.5, "reward: right answer, longest", **_REWARD)
    cosine_max_len: int = setting(0, "tokens of the longest; 0: max_completion_length", ge=0)
    repetition_n_grams: int = setting(3, "words of a phrase that counts as repeated", ge=1)
    repetition_max_penalty: float = setting(
        -1.0, "reward if all phrases repeat", ge=-HIGHEST_REWARD, le=0
    )
    soft_max_length: int = setting(0, "soft_overlong: tokens for -1; 0: max_completion_length", ge=0)
    soft_cache_length: int = setting(
        0, "soft_overlong: tokens in which the reward falls from 0 to -1", ge=0
    )
    target_language: str = setting("en", "language_consistency: ISO 639-1, such as en or zh")


class RewardsSettings(Section):
    """Rewards, and the advantages computed from them."""

    rewards: Names = setting(
        ["accuracy"],
        "reward names with commas; own functions as file.py:function or package.module.function; "
        "model:NAME=FOLDER-or-id for a reward model; judge:NAME=FILE.toml for a judge",
        min_length=1,
    )
    reward_weights: Numbers = setting([], "weight of each reward, with commas; empty: all 1.0")
    reward_completions: Literal["auto", "text", "messages"] = setting(
        "auto", "what own functions get; auto: messages if prompts are, or have a chat template"
    )
    filter_zero_std: bool = setting(True, "do not train groups with equal rewards")
    max_resample_times: int = setting(3, "extra rounds of groups until a smaller batch is trained", ge=0)
    max_empty_updates: int = setting(3, "batches in a row without a usable group that end the run", ge=1)
    advantage_estimator: AdvantageEstimator = setting(
        "grpo", "baseline: mean of the group, of its other completions, of the batch"
    )
    scale_rewards: Annotated[ScaleRewards, BeforeValidator(_refuse_truth_value)] = setting(
        "group", "standard deviation to divide by; none: Dr. GRPO"
    )
    multi_objective_aggregation: Aggregation = setting(
        "sum_then_normalize", "normalize_then_sum: normalize each reward in its group first (GDPO)"
    )


class EpisodeSettings(Section):
    """Tools, environments, agents: rollouts of several turns; see docs/environments.md."""

    tools: Names = setting(
        [],
        "functions that the policy may call, with commas: file.py:function or package.module.function",
    )
    environment: Names = setting(
        [], "class of the environment, as file.py:Class; of several the column `environment` names one"
    )
    max_tool_calling_iterations: int = setting(
        0, "completions with tool calls per rollout; 0: as many as fit", ge=0
    )
    tool_timeout_s: float = setting(
        30.0, "seconds that a tool, reset or get_reward may take; then the rollout is set aside", gt=0
    )
    agent: str = setting(
        "", "coroutine that owns its loop and asks the model over HTTP: file.py:function; no tools then"
    )
    agent_timeout_s: float = setting(
        600.0, "seconds of an agent's rollout, with the model's time; then it is set aside", gt=0
    )
    agent_sequences: int = setting(
        8,
        "sequences of an agent's rollout: one, and one more per rewritten history",
        ge=1,
        le=MOST_SEQUENCES,
    )


class LossSettings(Section):
    """Loss of the policy; see docs/losses.md."""

    loss_type: LossType = setting("dapo", "formula of the loss; see docs/losses.md")
    loss: str = setting("", "own loss: file.py:function or package.module.function; see docs/losses.md")
    importance_sampling_level: RatioLevel = setting(
        "token", "ratio in the loss: each token's, or the geometric mean of its sequence"
    )
    epsilon: float = setting(0.2, "lower clip range (dppo: probability difference)", gt=0)
    epsilon_high: float = setting(0.28, "upper clip range (dppo: probability difference)", gt=0)
    delta: float = setting(0.0, "dual clip: upper bound of the ratio; 0: none", ge=0)
    sapo_temperature_pos: float = setting(1.0, "sapo: temperature for advantages above 0", gt=0)
    sapo_temperature_neg: float = setting(1.05, "sapo: temperature for other advantages", gt=0)
    top_entropy_quantile: float = setting(
        1.0, "share of the batch's tokens, those of highest entropy, in the objective", ge=0, le=1
    )
    off_policy_mask_threshold: float = setting(
        0.0, "mask sequences with A < 0 and a mean log(behaviour / policy) above it; 0: none", ge=0
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    beta: float = setting(0.0, "weight of the KL to the reference model; 0: no model", ge=0)
    kl_estimator: KLEstimator = setting("k3", "estimator of the KL to the reference model")
    use_bias_correction_kl: bool = setting(False, "multiply the KL by the ratio: an unbiased gradient")
    mask_truncated_completions: bool = setting(
        False, "keep completions cut at max_completion_length out of the loss"
    )


class EntropySettings(Section):
    """Adaptive entropy: the bonus starts with entropy_coef and follows a target."""

    use_adaptive_entropy: bool = setting(False, "adapt entropy_coef at each optimizer step")
    entropy_target: float = setting(
        0.2, "mean entropy in nats, at or below which the coefficient grows and applies", ge=0
    )
    entropy_coef_min: float = setting(0.0, "lower bound of the coefficient", ge=0)
    entropy_coef_max: float = setting(1.0, "upper bound of the coefficient", ge=0)
    entropy_coef_delta: float = setting(0.005, "change of the coefficient per optimizer step", gt=0)


class LagSettings(Section):
    """Policy lag: the largest age of trained tokens, and the correction for it."""

    max_staleness: int = setting(1, "versions a trained token may lag; 0: synchronous", ge=0, le=100_000)
    at_max_staleness: Literal["pace", "drop", "requeue"] = setting(
        "pace", "groups about to exceed it: train first, drop, or sample again"
    )
    over_lag: Literal["mask", "set_aside"] = setting(
        "mask", "group with some tokens over the limit: mask them, or skip the group"
    )
    decoupled_loss: bool = setting(False, "clip against a proximal policy, computed with the batch")
    importance_sampling_correction: CorrectionLevel = setting(
        "token", "level at which the ratio of current to behavior policy is corrected"
    )
    importance_sampling_mode: CorrectionMode = setting(
        "truncate", "truncate at the cap; mask outside both bounds; clip to both"
    )
    importance_sampling_min: float = setting(0.5, "lower bound of the ratio, for mask and clip", ge=0)
    importance_sampling_cap: float = setting(2.0, "upper bound of the ratio", gt=0)


class OptimizerSettings(Section):
    """Optimizer steps of an Update, and the learning rate."""

    num_iterations: int = setting(1, "passes over a batch (mu)", ge=1)
    num_mini_batches: int = setting(1, "optimizer steps per pass", ge=1)
    shuffle_mini_batch: bool = setting(True, "form other mini-batches in each pass")
    learning_rate: float = setting(1e-6, "largest learning rate", gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "constant", "schedule of the learning rate after the warm-up"
    )
    min_lr: float = setting(0.0, "learning rate at the end of linear and cosine", ge=0)
    warmup_steps: int = setting(0, "Updates of linear warm-up", ge=0)
    warmup_ratio: float = setting(0.0, "linear warm-up as a share of all Updates", ge=0, lt=1)
    adam_beta1: float = setting(0.9, "AdamW: decay of the first moment", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "AdamW: decay of the second moment", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "AdamW: term that prevents division by zero", gt=0)
    weight_decay: float = setting(0.0, "AdamW: weight decay", ge=0)
    max_grad_norm: float = setting(1.0, "largest norm of unclipped gradients", gt=0)
    max_nonfinite_steps: int = setting(3, "Updates in a row with NaN or infinity that end the run", ge=1)
    max_logp_difference: float = setting(
        0.5, "sampling/sampling_logp_difference/mean that ends the run; 0: none", ge=0
    )


class ReferenceSettings(Section):
    """Reference model of the KL term (beta above 0)."""

    ref_device: str = setting("", "device of the reference model; empty: the policy's")
    sync_ref_model: bool = setting(False, "mix the policy into the reference model")
    ref_model_sync_steps: int = setting(512, "Updates between two mixtures", ge=1)
    ref_model_mixup_alpha: float = setting(0.6, "share of the policy in a mixture", gt=0, le=1)
    outer_iteration_steps: int = setting(0, "Updates until the policy is the reference; 0: never", ge=0)


class ModelSettings(Section):
    """Model, precision, LoRA, and memory."""

    model: str = setting("", "model to start from: a Hugging Face folder or a hub id")
    model_revision: str = setting("", "branch, tag or commit of a hub id; empty: main")
    attn_implementation: str = setting(
        "", "attention of transformers, such as sdpa or flash_attention_2; needs packing=false"
    )
    trust_remote_code: bool = setting(
        False, "run Python code of the model's folder in the learner; see docs/security.md"
    )
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(resolve_dtype)] = setting(
        "auto", "precision of the model: float32, bfloat16; auto: bfloat16 on a GPU, else float32",
        validate_default=True,
    )  # fmt: skip
    cast_lm_head_to_fp32: bool = setting(
        False, "compute logits in float32 in any dtype, in learner and actors"
    )
    share_device: bool = setting(
        False, "use the device by turns with the actors of this host, whose engines sleep meanwhile"
    )
    packing: bool = setting(True, "put several sequences into a row; false: one per row")
    micro_batch_tokens: int = setting(
        16384, "tokens per row (one forward pass); a longer sequence has its own row", ge=1
    )
    logprob_chunk: Annotated[int, BeforeValidator(resolve_logprob_chunk)] = setting(
        "auto", "tokens whose logits are in memory at once; auto: 1024 on a GPU, else 128", ge=1,
        validate_default=True,
    )  # fmt: skip
    gradient_checkpointing: bool = setting(False, "recompute activations to save memory")
    use_liger_kernel: bool = setting(False, "fused layers of liger-kernel (GPU)")
    zero_stage: Literal["auto", "0", "1", "2", "3"] = setting(
        "auto", "DeepSpeed ZeRO; auto: 0 for float32, 1 for bfloat16 (fp32 masters)"
    )
    offload_optimizer: bool = setting(False, "optimizer state in main memory (ZeRO 1-3)")
    offload_param: bool = setting(False, "keep the parameters in main memory (ZeRO 3)")
    lora_rank: int = setting(0, "rank of the LoRA adapter; 0: train all weights", ge=0)
    lora_alpha: int = setting(32, "LoRA scale times rank: the scale is alpha / rank", ge=1)
    lora_target_modules: Names = setting(["all-linear"], "modules that get an adapter")
    lora_publish_merged: bool = setting(
        False, "send whole merged weights to the actors, for models for which vLLM has no adapters"
    )
    peak_tflops: float = setting(0.0, "TFLOPS of the device, for MFU; 0: by its name", ge=0)


class OutputSettings(Section):
    """Checkpoints, journal, logged completions, and trackers."""

    save_steps: int = setting(50, "steps between two checkpoints", ge=1)
    save_total_limit: int = setting(2, "checkpoints to keep", ge=2)
    max_shard_size: str = setting(
        "5GB", "largest file of weights in a checkpoint or a version", pattern=r"^[1-9][0-9]*(KB|MB|GB)$"
    )
    save_only_model: bool = setting(False, "checkpoints without optimizer state; a resumed run differs")
    journal_segment_mib: float = setting(64.0, "size of a journal file, in MiB", gt=0)
    journal_retention: Literal["all", "resume"] = setting(
        "all", "all: keep all for a replay; resume: delete what no resume needs"
    )
    log_completions: bool = setting(True, "write completions/, a Parquet file per step")
    files_address: str = setting(
        "auto",
        "HOST:PORT where other hosts get the run's files, or an object store such as s3://bucket/runs; "
        "auto: towards the queue server; or off",
        pattern=r"^(auto|off|[^/@?#\s]+:[0-9]{1,5}|(s3|gs|az|abfs)://[^/@?#:\s][^@?#:\s]*|file:///[^@?#:\s]*)$",
    )
    files_url: str = setting(
        "", "URL by which other hosts reach files_address; empty: the same address",
        pattern=r"^(https?://[^@?#\s]+)?$",
    )  # fmt: skip
    publish_deltas: Literal["auto", "true", "false"] = setting(
        "auto", "offer what changed in the weights since the version before; auto: bfloat16, if fetched"
    )
    push_to_hub: bool = setting(False, "upload the models of checkpoints to a hub; needs HF_TOKEN")
    hub_model_id: str = setting("", "repository on the hub, such as name/model")
    hub_private_repo: bool = setting(False, "create the repository as a private one")
    hub_strategy: Literal["every_save", "end"] = setting(
        "every_save", "upload every checkpoint's model, or only that of the run's end"
    )
    hub_timeout_s: float = setting(600.0, "seconds that an upload to the hub may take", gt=0)
    report_to: Names = setting(
        [],
        "trackers beside metrics.jsonl, names with commas: wandb, tensorboard, or own ones "
        "as file.py:function or package.module.function",
    )


class LearnerSettings(
    OutputSettings, ModelSettings, ReferenceSettings, OptimizerSettings, LagSettings, EntropySettings,
    LossSettings, EpisodeSettings, RewardOptions, RewardsSettings, SamplingSettings, DataSettings,
    TrainingSettings,
):  # fmt: skip
    """LEARNER_*: the training; hyper-parameters have TRL's names."""

    _home = field_validator(
        "model", "dataset", "eval_dataset", "rewards", "tools", "environment", "agent", "loss", "resume"
    )(at_home)

    @model_validator(mode="after")
    def _data_sets_fit(self) -> "LearnerSettings":
        """Return self. Raise ValueError if dataset_weights are given, but not one per data set; for
        several answers per held-out question at temperature 0; for an eval_temperature above 0 and
        below 0.01; for evaluate_only without held-out questions; and for both eval_dataset and
        eval_holdout."""
        found, expected = len(self.dataset_weights), len(self.dataset)
        if self.dataset_weights and found != expected:
            raise ValueError(f"LEARNER_DATASET_WEIGHTS: set {expected}, one per data set, found {found}")
        if self.eval_num_generations > 1 and not self.eval_temperature:
            several = "LEARNER_EVAL_NUM_GENERATIONS over 1 needs LEARNER_EVAL_TEMPERATURE over 0"
            raise ValueError(f"{several} (of `penstock evaluate` --generations and --temperature)")
        if 0 < self.eval_temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"LEARNER_EVAL_TEMPERATURE: expected 0 or at least {LOWEST_TEMPERATURE}")
        if self.evaluate_only and not (self.eval_dataset or self.eval_holdout):
            raise ValueError("LEARNER_EVALUATE_ONLY needs LEARNER_EVAL_DATASET or LEARNER_EVAL_HOLDOUT")
        if self.eval_dataset and self.eval_holdout:
            raise ValueError("LEARNER_EVAL_DATASET and LEARNER_EVAL_HOLDOUT are both set: unset one")
        return self

    @model_validator(mode="after")
    def _a_push_has_its_repository(self) -> "LearnerSettings":
        """Return self. Raise ValueError if only one of push_to_hub and hub_model_id is set."""
        if self.push_to_hub != bool(self.hub_model_id):
            raise ValueError("only one of LEARNER_PUSH_TO_HUB, LEARNER_HUB_MODEL_ID is set: set both")
        return self

    @model_validator(mode="after")
    def _rewards_are_known(self) -> "LearnerSettings":
        """Return self. Raise ValueError if rewards, trackers or the rewards' parameters are wrong.

        Wrong are: reward_weights (if given) that are not one per reward; a reward or tracker neither
        built in nor of an own function's form (model: and judge: pass here); a metric_for_best_model
        that is no reward; two rewards of one name, or one named like a column of completions; an unknown
        target_language with language_consistency; soft_overlong without soft_cache_length; a
        soft_cache_length above soft_max_length, or, if soft_max_length is 0, above
        max_completion_length.
        """
        names = self.reward_names
        found, expected = len(self.reward_weights), len(names)
        if self.reward_weights and found != expected:
            raise ValueError(f"LEARNER_REWARD_WEIGHTS: set {expected}, one per reward, found {found}")
        functions = [one for one in self.rewards if not split_kind(one)]
        _check_functions("LEARNER_REWARDS", "reward", functions, BUILT_IN)
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
        if "language_consistency" in self.rewards and self.target_language not in LANGUAGES:
            raise ValueError(
                f"LEARNER_TARGET_LANGUAGE: {self.target_language!r} is not known; expected one of "
                f"{', '.join(sorted(LANGUAGES))}"
            )
        if "soft_overlong" in self.rewards and not self.soft_cache_length:
            raise ValueError(
                "LEARNER_REWARDS has soft_overlong, so set LEARNER_SOFT_CACHE_LENGTH: the tokens over "
                "which the punishment grows (the DAPO recipe: 819 of 4096)"
            )
        longest = self.soft_max_length or self.max_completion_length
        if self.soft_cache_length > longest:
            raise ValueError(
                f"LEARNER_SOFT_CACHE_LENGTH={self.soft_cache_length} is more than the {longest} tokens "
                "of LEARNER_SOFT_MAX_LENGTH (by default the longest completion): even an empty one "
                "would be punished, so lower it"
            )
        return self

    @model_validator(mode="after")
    def _episodes_fit(self) -> "LearnerSettings":
        """Return self. Raise ValueError if a setting of tools, environments or agents does not fit.

        Refused are: a text that names no function; two tools, or two environments, of one name; the
        reward "environment" without environment and agent; a max_tool_calling_iterations or
        tool_timeout_s other than the default without tools, environment and agent; overlong_prompts
        "truncate" with any of the three; and what `_check_agent` refuses: settings of an agent without
        one, or settings that an agent does not use.
        """
        _check_functions("LEARNER_TOOLS", "tool", self.tools, ())
        _check_functions("LEARNER_ENVIRONMENT", "environment", self.environment, ())
        if self.agent:
            _check_functions("LEARNER_AGENT", "agent", [self.agent], ())
        if "environment" in self.rewards and not (self.environment or self.agent):
            raise ValueError("LEARNER_REWARDS has environment: set LEARNER_ENVIRONMENT or LEARNER_AGENT")
        for variable, asked in (("TOOLS", self.tools), ("ENVIRONMENT", self.environment)):
            names = [split_source(one)[1] for one in asked]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"LEARNER_{variable}: two functions or classes have one name, expected different "
                    f"names: {', '.join(names)}; rename one in its file"
                )
        for name in ("max_tool_calling_iterations", "tool_timeout_s"):
            if getattr(self, name) != _default(name) and not self.has_episodes:
                raise ValueError(
                    f"LEARNER_{name.upper()} needs LEARNER_TOOLS, LEARNER_ENVIRONMENT or LEARNER_AGENT"
                )
        self._check_agent()
        if self.has_episodes and self.overlong_prompts == "truncate":
            raise ValueError(
                "LEARNER_OVERLONG_PROMPTS=truncate cuts a conversation, so no turn can be added: "
                "use drop with LEARNER_TOOLS, LEARNER_ENVIRONMENT and LEARNER_AGENT"
            )
        return self

    def _check_agent(self) -> None:
        """Raise ValueError if a setting needs `agent`, which is not set, or has no effect with it.

        Without `agent`, agent_timeout_s and agent_sequences must have their defaults. With it, tools,
        environment, max_tool_calling_iterations and system_prompt must be empty or 0.
        """
        for name in ("agent_timeout_s", "agent_sequences"):
            if getattr(self, name) != _default(name) and not self.agent:
                raise ValueError(f"LEARNER_{name.upper()} needs LEARNER_AGENT: set it, or unset this")
        for name in ("tools", "environment", "max_tool_calling_iterations", "system_prompt"):
            if self.agent and getattr(self, name):
                raise ValueError(
                    f"LEARNER_{name.upper()} does nothing with LEARNER_AGENT, which has tools, messages "
                    "and a loop of its own: leave it out"
                )

    @property
    def has_episodes(self) -> bool:
        """Return whether rollouts have several turns: with tools, an environment or an agent."""
        return bool(self.tools or self.environment or self.agent)

    @property
    def most_sequences(self) -> int:
        """Return the most sequences of a rollout: 1 unless an agent makes them."""
        return self.agent_sequences if self.agent else 1

    @model_validator(mode="after")
    def _generation_is_known(self) -> "LearnerSettings":
        """Return self. Raise ValueError for a fault of generation_kwargs.

        A fault is an unknown option, a value of a wrong type or over its limit, or a regex with choices.
        """
        try:
            check_generation(**self.sampling_options)
        except (ValueError, MalformedMessage) as error:
            raise ValueError(f"LEARNER_GENERATION_KWARGS: {error}; correct this option") from error
        return self

    @model_validator(mode="after")
    def _messages_can_carry_them(self) -> "LearnerSettings":
        """Return self. Raise ValueError for rewards that no message can carry.

        At most 1024 rewards, names of at most 200 characters, and weights from -1e9 to 1e9 are accepted.
        """
        longest = max(self.reward_names, key=len)
        if len(self.rewards) > MOST_NAMES or len(longest) > LONGEST_NAME:
            raise ValueError(
                f"LEARNER_REWARDS: {len(self.rewards)} rewards, the longest name has {len(longest)} "
                f"characters; expected at most {MOST_NAMES} rewards and {LONGEST_NAME} characters"
            )
        if any(abs(weight) > HIGHEST_REWARD for weight in self.reward_weights):
            raise ValueError(f"LEARNER_REWARD_WEIGHTS: expected weights within {HIGHEST_REWARD:g} of 0")
        return self

    @model_validator(mode="after")
    def _aggregation_has_its_own_normalization(self) -> "LearnerSettings":
        """Return self. Raise ValueError if normalize_then_sum would ignore another setting.

        These are an advantage_estimator other than "grpo" and a scale_rewards other than "group".
        """
        asked = {
            f"LEARNER_ADVANTAGE_ESTIMATOR={self.advantage_estimator}": self.advantage_estimator
            != "grpo",
            f"LEARNER_SCALE_REWARDS={self.scale_rewards}": self.scale_rewards != "group",
        }
        ignored = ", ".join(text for text, differs in asked.items() if differs)
        if self.multi_objective_aggregation == "normalize_then_sum" and ignored:
            raise ValueError(
                f"{ignored} has no effect with LEARNER_MULTI_OBJECTIVE_AGGREGATION=normalize_then_sum, "
                "which normalizes each reward in its group and the sums in the batch: leave it out, or "
                "use sum_then_normalize"
            )
        return self

    @property
    def sampling_options(self) -> dict[str, Any]:
        """Return the fields of a ticket's Sampling that generation_kwargs gives; {} if it is empty.

        Raise ValueError for an unknown option or a value of a wrong type. Example: {"stop": "</answer>"}
        gives {"stop": ("</answer>",)}.
        """
        return sampling_options(self.generation_kwargs)

    @property
    def main_reward(self) -> str:
        """Return the name of the reward that decides whether an answer is right.

        This is metric_for_best_model or, if that is empty, the first built-in reward of accuracy's kind.
        Without one it is the first reward.
        """
        alike = (name for name in self.rewards if name in ACCURACY_LIKE)
        return self.metric_for_best_model or next(alike, self.reward_names[0])

    @property
    def right_from(self) -> float | None:
        """Return the value of the main reward from which an answer is right; None: no answer is judged.

        This is eval_threshold, or if that is "auto" 1. It is None for the auto threshold of a judge, a
        reward model, and a built-in reward that rates form or length.
        """
        if self.eval_threshold != "auto":
            return self.eval_threshold
        asked = self.rewards[self.reward_names.index(self.main_reward)]
        shaped = asked in BUILT_IN and asked not in (*ACCURACY_LIKE, "environment")
        return None if shaped or split_kind(asked) else 1.0

    @property
    def reward_names(self) -> list[str]:
        """Return the rewards' names in metrics and logs, in the order of `rewards`.

        Example: "short" for "my/rewards.py:short", "helpful" for "model:helpful=models/rm".
        """
        kinds = [split_kind(one) for one in self.rewards]
        return [
            kind[1] if kind else split_source(one)[1]
            for kind, one in zip(kinds, self.rewards, strict=True)
        ]

    @model_validator(mode="after")
    def _reward_models_have_names(self) -> "LearnerSettings":
        """Return self. Raise ValueError for a model:NAME=PLACE or judge:NAME=PLACE that cannot be used.

        The name must be an identifier and not that of a built-in reward. The place must not be empty.
        """
        for kind, name, place in filter(None, map(split_kind, self.rewards)):
            if not name.isidentifier() or name in BUILT_IN or not place:
                raise ValueError(
                    f"LEARNER_REWARDS={kind}:{name}={place}: expected model:NAME=FOLDER, model:NAME=ID "
                    "or judge:NAME=FILE.toml, with a name of letters that no built-in reward has"
                )
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "LearnerSettings":
        """Return self. Raise ValueError for importance_sampling_min above the cap; mode "clip" for whole
        sequences without decoupled_loss; epsilon of 1 or more, unless with cispo, dppo or sapo; delta
        not 0 and not above 1 + epsilon_high; min_lr above learning_rate; or both warm-ups."""
        if self.importance_sampling_min > self.importance_sampling_cap:
            raise ValueError("LEARNER_IMPORTANCE_SAMPLING_MIN is above LEARNER_IMPORTANCE_SAMPLING_CAP")
        whole = self.importance_sampling_correction in ("sequence", "geometric")
        if whole and self.importance_sampling_mode == "clip" and not self.decoupled_loss:
            raise ValueError(
                "LEARNER_IMPORTANCE_SAMPLING_MODE=clip for sequences needs LEARNER_DECOUPLED_LOSS=true"
            )
        if self.epsilon >= 1 and self.loss_type not in ("cispo", "dppo", "sapo"):
            raise ValueError(f"LEARNER_EPSILON={self.epsilon:g}: expected a number below 1, lower it")
        if self.delta and self.delta <= 1 + self.epsilon_high:
            raise ValueError(f"LEARNER_DELTA={self.delta:g}: set 0, or above 1 + LEARNER_EPSILON_HIGH")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"LEARNER_MIN_LR={self.min_lr:g} is above LEARNER_LEARNING_RATE: lower it")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("LEARNER_WARMUP_STEPS and LEARNER_WARMUP_RATIO are both set: unset one")
        return self

    @model_validator(mode="after")
    def _the_loss_uses_them(self) -> "LearnerSettings":
        """Return self. Raise ValueError if a loss setting has no effect, or `loss` names no function.

        Without effect are: delta with cispo, dppo, sapo or an own loss; level "sequence" with dppo; a
        temperature of sapo, other than its default, with another loss; use_bias_correction_kl with beta
        0.
        """
        temperatures = ("sapo_temperature_pos", "sapo_temperature_neg")
        ignored = {
            "delta": bool(self.delta) and (self.loss_type in ("cispo", "dppo", "sapo") or self.loss),
            "importance_sampling_level": self.importance_sampling_level == "sequence"
            and self.loss_type == "dppo",
            **{
                name: self.loss_type != "sapo" and getattr(self, name) != _default(name)
                for name in temperatures
            },
        }
        for name in filter(ignored.get, ignored):
            raise ValueError(
                f"LEARNER_{name.upper()} has no effect with LEARNER_LOSS_TYPE={self.loss_type}"
                f"{' and LEARNER_LOSS' if self.loss else ''}: leave it out"
            )
        if self.use_bias_correction_kl and not self.beta:
            found = "LEARNER_USE_BIAS_CORRECTION_KL has no effect with LEARNER_BETA=0"
            raise ValueError(f"{found}: leave it out, or set LEARNER_BETA above 0")
        if self.loss:
            _check_functions("LEARNER_LOSS", "loss", [self.loss], ())
        return self

    @model_validator(mode="after")
    def _entropy_is_adapted(self) -> "LearnerSettings":
        """Return self. Raise ValueError if an entropy setting has no effect or is out of bounds.

        Without use_adaptive_entropy all other settings of adaptive entropy must have their defaults.
        With it, entropy_coef must be from entropy_coef_min to entropy_coef_max.
        """
        fields = EntropySettings.model_fields
        changed = [name for name, field in fields.items() if getattr(self, name) != field.default]
        if changed and not self.use_adaptive_entropy:
            raise ValueError(
                f"LEARNER_{changed[0].upper()} has no effect without LEARNER_USE_ADAPTIVE_ENTROPY=true: "
                "set that too, or leave it out"
            )
        low, high = self.entropy_coef_min, self.entropy_coef_max
        if self.use_adaptive_entropy and not low <= self.entropy_coef <= high:
            raise ValueError(
                f"LEARNER_ENTROPY_COEF={self.entropy_coef:g}: expected the first coefficient within "
                f"LEARNER_ENTROPY_COEF_MIN and LEARNER_ENTROPY_COEF_MAX, {low:g} to {high:g}"
            )
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> "LearnerSettings":
        """Return self. Raise ValueError for ZeRO stage 0 with bfloat16 or offload_optimizer,
        offload_param below stage 3, or more mini-batches than completions in a batch."""
        stage = self.resolved_zero_stage
        if self.dtype == "bfloat16" and stage == 0:
            raise ValueError(
                "LEARNER_ZERO_STAGE=0 with LEARNER_DTYPE=bfloat16 would train without fp32 master "
                "weights, and small steps would be lost to rounding: use stage 1 (or auto), or float32"
            )
        if self.offload_optimizer and stage == 0:
            raise ValueError("LEARNER_OFFLOAD_OPTIMIZER needs LEARNER_ZERO_STAGE 1, 2 or 3, found 0")
        if self.offload_param and stage < 3:
            raise ValueError(f"LEARNER_OFFLOAD_PARAM needs LEARNER_ZERO_STAGE=3, found {stage}")
        completions = self.groups_per_step * self.num_generations
        if self.num_mini_batches > completions:
            raise ValueError(
                f"LEARNER_NUM_MINI_BATCHES={self.num_mini_batches}: expected at most {completions}, "
                "the completions of a batch"
            )
        return self

    @model_validator(mode="after")
    def _the_device_can_be_left(self) -> "LearnerSettings":
        """Return self. Raise ValueError for share_device with ZeRO stage 3 or offload_optimizer."""
        if self.share_device and (self.resolved_zero_stage == 3 or self.offload_optimizer):
            raise ValueError(
                "LEARNER_SHARE_DEVICE moves weights and optimizer to the CPU's memory between Updates, "
                "which needs LEARNER_ZERO_STAGE below 3 and no LEARNER_OFFLOAD_OPTIMIZER"
            )
        return self

    @model_validator(mode="after")
    def _attention_is_used(self) -> "LearnerSettings":
        """Return self. Raise ValueError if attn_implementation is set with packing, which ignores it."""
        if self.attn_implementation and self.packing:
            raise ValueError(
                f"LEARNER_ATTN_IMPLEMENTATION={self.attn_implementation}: packed rows have an attention "
                "of their own. Set LEARNER_PACKING=false, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _vllm_has_adapters_of_this_rank(self) -> "LearnerSettings":
        """Return self. Raise ValueError for a lora_rank above 512 without lora_publish_merged."""
        if self.lora_rank > MOST_ADAPTER_RANK and not self.lora_publish_merged:
            raise ValueError(
                f"LEARNER_LORA_RANK={self.lora_rank}: vLLM has adapters up to rank {MOST_ADAPTER_RANK}. "
                "Lower it, or set LEARNER_LORA_PUBLISH_MERGED=true"
            )
        return self

    @model_validator(mode="after")
    def _the_reference_is_used(self) -> "LearnerSettings":
        """Return self. Raise ValueError for a reference model that has no effect, or cannot be saved.

        So for save_only_model or LoRA with a reference that changes (beta above 0, and sync_ref_model or
        outer_iteration_steps), save_only_model with LoRA, ref_device with LoRA or beta 0, and
        sync_ref_model with beta 0.
        """
        reference_changes = self.beta and (self.sync_ref_model or self.outer_iteration_steps)
        if self.save_only_model and (self.lora_rank or reference_changes):
            raise ValueError(
                "LEARNER_SAVE_ONLY_MODEL loses an adapter's base and a changed reference model: not "
                "with LEARNER_LORA_RANK, LEARNER_SYNC_REF_MODEL or LEARNER_OUTER_ITERATION_STEPS"
            )
        if self.lora_rank and reference_changes:
            raise ValueError(
                "with LoRA the reference is the base model, which does not change: leave "
                "LEARNER_SYNC_REF_MODEL and LEARNER_OUTER_ITERATION_STEPS off, or train all weights"
            )
        if self.ref_device and (self.lora_rank or not self.beta):
            raise ValueError("LEARNER_REF_DEVICE: no reference model (LEARNER_BETA=0 or LoRA): clear it")
        if self.sync_ref_model and not self.beta:
            raise ValueError("LEARNER_SYNC_REF_MODEL: no reference model (LEARNER_BETA=0): leave it off")
        return self

    @property
    def resolved_zero_stage(self) -> int:
        """Return the ZeRO stage as a number from 0 to 3.

        "auto" is 1 with dtype bfloat16 (for fp32 master weights) and 0 with float32.
        """
        return int(self.dtype == "bfloat16") if self.zero_stage == "auto" else int(self.zero_stage)

    @property
    def credit(self) -> int:
        """Return how many training tickets may be open at a time: (max_staleness + 1) * groups_per_step.

        A ticket is open from its issue until the learner counts its end, such as trained.
        """
        return (self.max_staleness + 1) * self.groups_per_step


def _default(name: str) -> Any:
    """Return the default of the learner's setting `name`, such as "sapo_temperature_pos"."""
    return LearnerSettings.model_fields[name].default


def _check_functions(variable: str, kind: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError unless each text of `asked` is in `known` or has the form of an own function.

    The forms are file.py:function and package.module.function; the function is not looked for. The error
    begins with `variable`, such as LEARNER_REWARDS, and calls the text a `kind`, such as "reward".
    """
    for text in asked:
        source, name = split_source(text)
        if not name.isidentifier() or text.endswith(".py"):
            raise ValueError(
                f"{variable}: {text!r} names no function: expected a {kind}, or file.py:function"
            )
        if not source and name not in known:
            hint = did_you_mean(name, known, f"known are {', '.join(known) or 'none'}")
            raise ValueError(
                f"{variable}: there is no {kind} {name!r}: {hint} (own functions: file.py:function or "
                "package.module.function)"
            )
