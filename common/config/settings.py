"""Settings: environment variables first, every variable also a flag.

A command's settings are sections, one per prefix: RUN_ is shared by all roles, LEARNER_, ACTOR_ and
REWARDER_ belong to one each. LEARNER_MAX_STEPS=10 and `learner --learner.max-steps 10` are the same.
A flag wins over the environment, the environment over the file given with --env-file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat
from pydantic_settings import NoDecode

from penstock.common.files.run_folder import RunFolder


def split_commas(value: object) -> object:
    """Return the list of a text with commas, such as ["a", "b"] for "a, b"; other values unchanged."""
    return (
        [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    )


Names = Annotated[list[str], NoDecode, BeforeValidator(split_commas)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(split_commas)]
PositiveNumbers = Annotated[list[PositiveFloat], NoDecode, BeforeValidator(split_commas)]


class Section(BaseModel):
    """Base of the sections: unknown fields and infinite numbers are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    parts: ClassVar[Mapping[str, type["Section"]]] = {}
    """The sections that this one consists of, by their names in `learner help NAME`."""


class RunSettings(Section):
    """RUN_*: settings that all processes of a run share."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of the run")
    dir: Path = Field(Path("runs"), description="folder that holds the folders of the runs")
    lease_s: float = Field(
        30.0,
        gt=0,
        description="lease time in seconds: work, or the learner's role, passes to another process when"
        " it is not renewed in this time",
    )
    max_attempts: int = Field(3, ge=1, description="failed attempts after which a ticket is dead")
    connect_timeout_s: float = Field(10.0, gt=0, description="seconds to wait for the server at start")
    server_timeout_s: float = Field(60.0, gt=0, description="seconds to wait for a lost queue server")
    join_timeout_s: float = Field(
        300.0, gt=0, description="seconds to wait for the run's setup, after the last heartbeat"
    )
    progress_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds without any result, or without the learner's heartbeat, after which a "
        "process ends",
    )
    disk_timeout_s: float = Field(600.0, ge=0, description="seconds to wait for room on a full disk")
    log_format: Literal["text", "json"] = Field("text", description="format of the log lines")

    @property
    def folder(self) -> RunFolder:
        """Return the run's own folder."""
        return RunFolder(self.dir / self.name)


class ActorSettings(Section):
    """ACTOR_*: one inference engine. Tickets hold the sampling parameters."""

    dtype: Literal["", "float32", "bfloat16"] = Field("", description="precision; empty: the learner's")
    max_num_seqs: int = Field(256, ge=1, description="completions generated at the same time")
    max_model_len: int = Field(0, ge=0, description="tokens of prompt and completion; 0: the run's")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory that vLLM uses"
    )
    kv_cache_gib: float = Field(1.0, gt=0, description="size of the key-value cache on a CPU, in GiB")
    enforce_eager: bool = Field(True, description="no compilation or CUDA graphs: quick start")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that one engine uses")
    enable_prefix_caching: bool = Field(True, description="reuse keys and values of equal prompts")
    start_timeout_s: float = Field(600.0, gt=0, description="seconds that the engine may take to start")
    stall_timeout_s: float = Field(
        120.0, gt=0, description="seconds without a new token after which the actor gives its work back"
    )


class RewarderSettings(Section):
    """REWARDER_*: one pool of scoring processes. The run's contract names the rewards."""

    workers: int = Field(2, ge=1, description="scoring processes; one that hangs is killed and replaced")
    timeout_s: float = Field(30.0, gt=0, description="seconds that one reward of one group may take")
    user: str = Field(
        "nobody", description="user of the scoring processes when root starts the rewarder; empty: root"
    )
    environment: Names = Field(
        [], description="variables that scoring processes see, beside PATH and a few others"
    )
    memory_gib: float = Field(
        4.0,
        gt=0,
        description="address space of a scoring process in GiB; scoring ends when a quarter of it is in"
        " use",
    )
