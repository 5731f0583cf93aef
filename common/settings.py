"""Settings: environment variables first, every variable also a flag.

A command's settings are sections, one per prefix: RUN_ is shared by all roles, LEARNER_, ACTOR_ and
REWARDER_ belong to one each. LEARNER_MAX_STEPS=10 and `learner --learner.max-steps 10` are the same.
A flag wins over the environment, the environment over the file given with --env-file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode


def _split_commas(value: Any) -> Any:
    return (
        [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    )


Names = Annotated[list[str], NoDecode, BeforeValidator(_split_commas)]
Trackers = Annotated[list[Literal["wandb"]], NoDecode, BeforeValidator(_split_commas)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(_split_commas)]


class Section(BaseModel):
    """Base of the sections: unknown fields are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSettings(Section):
    """RUN_*: what every role of a run shares."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's name")
    dir: Path = Field(Path("runs"), description="folder that holds the runs' folders")
    lease_s: float = Field(30.0, gt=0, description="work not renewed for so long is given to others")
    max_attempts: int = Field(3, ge=1, description="failed attempts after which a ticket is dead")
    connect_timeout_s: float = Field(10.0, gt=0, description="wait for the queue server at start")
    server_timeout_s: float = Field(60.0, gt=0, description="wait for a lost queue server")
    join_timeout_s: float = Field(300.0, gt=0, description="wait for the learner to set up the run")
    progress_timeout_s: float = Field(
        600.0, gt=0, description="end the run when nothing came back for so long"
    )
    log_format: Literal["text", "json"] = Field("text", description="form of the log lines")

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.dir / self.name


class LearnerSettings(Section):
    """LEARNER_*: the training; hyper-parameters have TRL's names."""

    model: str = Field("", description="policy to start from: a folder or a hub id")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="precision of the model")
    seed: int = Field(42, ge=0, description="seed of the data order and of the sampling")

    dataset: str = Field("", description="training questions: a JSONL file or a hub id")
    dataset_split: str = Field("train", description="split of the training questions")
    eval_dataset: str = Field("", description="held-out questions: a JSONL file or a hub id")
    eval_split: str = Field("test", description="split of the held-out questions")
    eval_samples: int = Field(0, ge=0, description="held-out questions used; 0 means all")
    eval_steps: int = Field(0, ge=0, description="evaluate every so many steps; 0: start and end")
    prompt_column: str = Field("", description="column with the question; empty: recognised")
    solution_column: str = Field("", description="column with the gold answer; empty: recognised")
    system_prompt: str = Field("", description="system message put before each question")
    prompt_template: Literal["auto", "chat", "none"] = Field(
        "auto", description="chat: the tokenizer's template; none: the bare question"
    )
    max_prompt_length: int = Field(512, ge=1, description="longer prompts are left out, in tokens")

    num_generations: int = Field(8, ge=2, description="completions per prompt")
    max_completion_length: int = Field(512, ge=1, description="tokens per completion")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="below 1 the importance ratio is biased")
    top_k: int = Field(0, ge=0, description="0 means all; else the importance ratio is biased")
    min_p: float = Field(0.0, ge=0, le=1, description="above 0 the importance ratio is biased")

    groups_per_step: int = Field(8, ge=1, description="prompts per batch")
    max_steps: int = Field(0, ge=0, description="Updates to make; 0: by num_train_epochs")
    num_train_epochs: float = Field(1.0, gt=0, description="passes over the questions")
    max_staleness: int = Field(1, ge=0, description="versions a trained token may lag")
    max_resample_times: int = Field(
        3, ge=0, description="extra rounds of groups for one batch before it is taken smaller"
    )

    loss_type: Literal["grpo", "dapo"] = Field("dapo", description="mean per sequence, per token")
    epsilon: float = Field(0.2, gt=0, description="clip range below")
    epsilon_high: float = Field(0.28, gt=0, description="clip range above")
    importance_sampling_cap: float = Field(
        2.0, gt=0, description="truncation of the current-to-behaviour ratio"
    )
    learning_rate: float = Field(1e-6, gt=0, description="peak learning rate")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate goes after the warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="of AdamW")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="of AdamW")
    adam_epsilon: float = Field(1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    micro_batch_tokens: int = Field(
        16384, ge=1, description="padded positions per forward pass; bounds the memory"
    )

    rewards: Names = Field(["accuracy"], min_length=1, description="names, with commas")
    reward_weights: Numbers = Field([], description="one per reward; empty: all 1.0")
    filter_zero_std: bool = Field(True, description="groups without spread are not trained")

    save_steps: int = Field(50, ge=1, description="checkpoint every so many steps")
    save_total_limit: int = Field(2, ge=2, description="checkpoints kept")
    log_completions: bool = Field(True, description="write completions.jsonl")
    report_to: Trackers = Field([], description="trackers beside metrics.jsonl: wandb")

    @model_validator(mode="after")
    def _weights_match_rewards(self) -> LearnerSettings:
        found, expected = len(self.reward_weights), len(self.rewards)
        if self.reward_weights and found != expected:
            raise ValueError(f"LEARNER_REWARD_WEIGHTS has {found} weights for {expected} rewards")
        return self

    @property
    def credit(self) -> int:
        """Train tickets that may be outstanding at once."""
        return (self.max_staleness + 1) * self.groups_per_step


class ActorSettings(Section):
    """ACTOR_*: one inference engine. What to sample rides on the tickets."""

    dtype: Literal["", "float32", "bfloat16"] = Field("", description="empty: the learner's")
    max_num_seqs: int = Field(256, ge=1, description="completions in flight at once")
    max_model_len: int = Field(0, ge=0, description="tokens per sequence; 0: the contract's")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory for vLLM"
    )
    kv_cache_gib: float = Field(1.0, gt=0, description="key-value cache on a CPU, in GiB")
    enforce_eager: bool = Field(True, description="no compilation, no CUDA graphs: quick start")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one engine")
    enable_prefix_caching: bool = Field(True, description="share prompts' keys and values")
    start_timeout_s: float = Field(600.0, gt=0, description="wait for the engine's start")
    stall_timeout_s: float = Field(
        120.0, gt=0, description="leases are let go when no token came for so long"
    )


class RewarderSettings(Section):
    """REWARDER_*: one pool of scoring workers. Which rewards count is in the contract."""

    workers: int = Field(2, ge=1, description="killable scoring processes")
    timeout_s: float = Field(30.0, gt=0, description="limit for one reward of one group")
    memory_gib: float = Field(
        4.0,
        gt=0,
        description="address space of a scoring process; a quarter of it in use ends the scoring",
    )
