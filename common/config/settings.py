"""Settings: environment variables first, every variable also a flag.

A command's settings are sections, one per prefix: RUN_ is shared by all roles, LEARNER_, ACTOR_ and
REWARDER_ belong to one each. LEARNER_MAX_STEPS=10 and `learner --learner.max-steps 10` are the same.
A flag wins over the environment, the environment over the file given with --env-file.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    field_validator,
)
from pydantic_settings import NoDecode

from penstock.common.config.engine_args import check_engine_args
from penstock.common.files.reading import at_home, parse_json
from penstock.common.files.run_folder import RunFolder
from penstock.common.wire.plain import brief


def split_commas(value: object) -> object:
    """Return the parts between commas of the text `value`, without spaces around and empty parts.

    Example: ["a", "b"] for "a, b,", and [] for "". A value that is no text is returned unchanged.
    """
    if not isinstance(value, str):
        return value
    return [item for part in value.split(",") if (item := part.strip())]


def read_json_map(value: object) -> object:
    """Return the map of a JSON text, such as {"a": 1} for '{"a": 1}'; an empty text gives {}.

    A map is returned as it is, and so is a value that is neither text nor map. Raise ValueError for a
    text that is no map in JSON, and for a map that JSON cannot hold, such as one with NaN.
    """
    if not isinstance(value, (str, dict)):
        return value
    try:
        found = parse_json(value or "{}") if isinstance(value, str) else value
        if not isinstance(found, dict):
            raise ValueError(f"found {brief(found)}; write a map in braces")
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f'expected a JSON map, such as {{"name": true}}, as the value of this setting: {error}'
        ) from error
    return found


JsonMap = Annotated[dict[str, Any], NoDecode, BeforeValidator(read_json_map)]
Names = Annotated[list[str], NoDecode, BeforeValidator(split_commas)]
Numbers = Annotated[list[float], NoDecode, BeforeValidator(split_commas)]
PositiveNumbers = Annotated[list[PositiveFloat], NoDecode, BeforeValidator(split_commas)]


def setting(default: Any, description: str, **limits: Any) -> Any:
    """Return a field of a section with this default and, for its help, this description.

    `limits` are those of pydantic's Field, such as ge=1 for a value of at least 1.
    """
    return Field(default, description=description, **limits)


class Section(BaseModel):
    """Base of the sections: unknown fields and infinite numbers are refused, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_64_bits(cls, value: Any) -> Any:
        """Return the value of a field. Raise ValueError for a whole number that no message can hold."""
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError("expected a whole number of at most 64 bits")
        return value


class RunSettings(Section):
    """RUN_*: settings that all processes of a run share."""

    name: str = setting("run", "name of the run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    dir: Path = setting(Path("runs"), "folder that holds the folders of the runs")
    lease_s: float = setting(
        15.0, "lease time in seconds; unless renewed, work or the learner's role passes on",
        gt=0, le=86_400,
    )  # fmt: skip
    max_attempts: int = setting(3, "failed attempts after which a ticket is dead", ge=1)
    connect_timeout_s: float = setting(10.0, "seconds to wait for the server at start", gt=0)
    server_timeout_s: float = setting(60.0, "seconds to wait for a lost queue server", gt=0)
    cache_dir: Path = setting(Path("~/.cache/penstock"), "folder for files from the learner")
    allow_file_store: bool = setting(False, "fetch files from a file:// URL of the learner")
    delta_mib: int = setting(64, "most MiB of deltas on the queue server", ge=0, le=4096)
    join_timeout_s: float = setting(300.0, "seconds to wait for setup after a heartbeat", gt=0)
    progress_timeout_s: float = setting(
        600.0, "seconds without any result or learner's heartbeat after which a process ends", gt=0
    )
    umask: str = setting(
        "077", "rights that others lack on the run's files, octal: 027 shares them with the group",
        pattern=r"^0?0[0-7]{2}$",
    )  # fmt: skip
    allow_open_server: bool = setting(
        False, "accept a queue server that lets in everybody in the network without a password"
    )
    queue_password_file: str = setting(
        "", "file with the password for `penstock up --listen`, readable by its owner alone"
    )
    disk_timeout_s: float = setting(600.0, "seconds to wait for room on a full disk", ge=0)
    log_format: Literal["text", "json"] = setting("text", "format of the log lines")

    _home = field_validator("dir", "queue_password_file")(at_home)

    @property
    def folder(self) -> RunFolder:
        """Return the paths in the run's own folder, `name` in `dir`: by default runs/run."""
        return RunFolder(self.dir / self.name)


WeightsFrom = Literal["auto", "folder", "queue", "http", "store"]
"""By which way versions of the weights come to an actor: docs/weights.md."""


class ActorSettings(Section):
    """ACTOR_*: one inference engine. Tickets hold the sampling parameters."""

    dtype: Literal["", "float32", "bfloat16"] = setting("", "precision; empty: the learner's")
    max_num_seqs: int = setting(256, "completions generated at the same time", ge=1)
    max_model_len: int = setting(0, "tokens of prompt and completion; 0: the run's", ge=0)
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory that vLLM uses", gt=0, le=1)
    kv_cache_gib: float = setting(1.0, "size of the key-value cache on a CPU, in GiB", gt=0)
    enforce_eager: Literal["auto"] | bool = setting(
        "auto", "no compilation or CUDA graphs, for a quick start; auto: on a CPU"
    )
    tensor_parallel_size: int = setting(1, "GPUs that one engine uses", ge=1)
    pipeline_parallel_size: int = setting(1, "stages, on GPUs of their own, of one engine", ge=1)
    enable_expert_parallel: bool = setting(False, "spread a model's experts over the engine's GPUs")
    trust_remote_code: bool = setting(
        False, "run Python code of the model's folder in the actor; see docs/security.md"
    )
    enable_prefix_caching: bool = setting(True, "reuse keys and values of equal prompts")
    max_num_batched_tokens: int = setting(0, "tokens of one step of the engine; 0: vLLM's choice", ge=0)
    weights_from: WeightsFrom = setting(
        "auto",
        "how weights come: the run's folder, the queue server (only what changed), the learner's file "
        "server, an object store, or what works",
    )
    engine_args: JsonMap = setting({}, "further arguments of vLLM's engine, as a JSON map")
    probe_limit: Literal["auto"] | NonNegativeFloat = setting(
        "auto", "mean difference of an engine's log-probabilities from the learner's at which the actor "
        "ends; 0: no probe; auto: 0.01, and 0.1 in bfloat16",
    )  # fmt: skip
    sleep_level: Literal[1, 2] = setting(
        1,
        "a sleeping engine (LEARNER_SHARE_DEVICE) keeps its weights in the CPU's memory; 2: drops them",
    )
    start_timeout_s: float = setting(600.0, "seconds that the engine may take to start", gt=0)
    stall_timeout_s: float = setting(120.0, "seconds without a new token until work is given back", gt=0)
    grace_s: float = setting(
        30.0,
        "seconds from SIGTERM until the platform kills the actor; it hands its work over before",
        gt=0,
    )
    episode_workers: int = setting(64, "rollouts with tools, an environment or an agent at a time", ge=1)
    episode_memory_gib: float = setting(
        4.0, "address space of an episode's process in GiB; a quarter in use ends the episode", gt=0
    )
    episode_user: str = setting(
        "nobody", "user of the episodes' processes if root starts the actor; empty: root"
    )
    episode_environment: Names = setting([], "variables that this code sees beside PATH and a few")

    @field_validator("engine_args")
    @classmethod
    def _left_to_the_user(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return `value` unchanged. Raise ValueError if it has an argument that Penstock sets itself."""
        check_engine_args(value)
        return value


class RewarderSettings(Section):
    """REWARDER_*: one pool of scoring processes. The run's contract names the rewards."""

    workers: int = setting(2, "scoring processes; one that hangs is killed and replaced", ge=1)
    timeout_s: float = setting(30.0, "seconds that one call of a reward may take", gt=0)
    user: str = setting("nobody", "user of scoring processes if root starts the rewarder; empty: root")
    environment: Names = setting([], "variables that scoring processes see beside PATH and a few")
    reward_model_device: str = setting("", "device of reward models; empty: a GPU if there is one")
    reward_model_batch_size: int = setting(16, "completions that a reward model reads at a time", ge=1)
    reward_model_timeout_s: float = setting(
        300.0, "seconds that a reward model may take for a group, or to start", gt=0
    )
    judge_timeout_s: float = setting(60.0, "seconds that one call of a judge may take", gt=0)
    judge_max_retries: int = setting(5, "retries of a judge's call that failed", ge=0)
    judge_max_concurrency: int = setting(16, "calls of judges at a time", ge=1)
    memory_gib: float = setting(
        4.0, "address space of a scoring process in GiB; a quarter in use ends scoring", gt=0
    )
