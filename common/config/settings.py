"""Settings: environment variables first, every variable also a flag.

A command's settings are sections, one per prefix: RUN_ is shared by all roles, LEARNER_, ACTOR_ and
REWARDER_ belong to one each. LEARNER_MAX_STEPS=10 and `learner --learner.max-steps 10` are the same.
A flag wins over the environment, the environment over the file given with --env-file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode

from penstock.common.files.run_folder import RunFolder


def split_commas(value: Any) -> Any:
    """A list written with commas, as in an environment variable."""
    return (
        [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
    )


Names = Annotated[list[str], NoDecode, BeforeValidator(split_commas)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(split_commas)]


class Section(BaseModel):
    """Base of the sections: unknown fields and infinite numbers are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    parts: ClassVar[Mapping[str, type["Section"]]] = {}
    """The sections this one is put together from, by the name in `learner help NAME`; empty: none."""


class RunSettings(Section):
    """RUN_*: what every role of a run shares."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run's name")
    dir: Path = Field(Path("runs"), description="folder that holds the runs' folders")
    lease_s: float = Field(
        30.0,
        gt=0,
        description="what is not renewed for so long is given to others: work, the learner's place",
    )
    max_attempts: int = Field(3, ge=1, description="failed attempts after which a ticket is dead")
    connect_timeout_s: float = Field(10.0, gt=0, description="wait for the queue server at start")
    server_timeout_s: float = Field(60.0, gt=0, description="wait for a lost queue server")
    join_timeout_s: float = Field(
        300.0, gt=0, description="wait for a learner to set up the run, from its last sign of life"
    )
    progress_timeout_s: float = Field(
        600.0,
        gt=0,
        description="end when nothing came back, or the learner gave no sign of life, for so long",
    )
    disk_timeout_s: float = Field(600.0, ge=0, description="wait for room on a full disk")
    log_format: Literal["text", "json"] = Field("text", description="form of the log lines")

    @property
    def folder(self) -> RunFolder:
        """The run's own folder."""
        return RunFolder(self.dir / self.name)


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
    user: str = Field(
        "nobody", description="whom scoring processes run as when root starts them; empty: root"
    )
    environment: Names = Field(
        [], description="environment variables that scoring processes see, beside PATH and the like"
    )
    memory_gib: float = Field(
        4.0,
        gt=0,
        description="address space of a scoring process; a quarter of it in use ends the scoring",
    )
