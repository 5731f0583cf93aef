"""The run's contract: the settings that all its processes must share, published by the learner."""

import hashlib
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError, ContractMismatch
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.codec import encode
from penstock.common.wire.episode_spec import EpisodeSpec
from penstock.common.wire.ids import LARGEST
from penstock.common.wire.limits import (
    HIGHEST_REWARD,
    LARGEST_INT32,
    MOST_SEQUENCES,
    check_names,
    check_numbers,
    check_paths,
    check_plain,
    check_range,
    require,
)
from penstock.common.wire.reward_spec import Aggregation, RewardSpec

LARGEST_SHARED_FILE = 256 << 20
_SHARED = re.compile(
    r"((generation_|tokenizer_|preprocessor_|processor_|quantization_|hf_quant_)?config|tokenizer|tekken"
    r"|special_tokens_map|added_tokens|vocab|chat_template)\.json|(merges|vocab)\.txt"
    r"|[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.(jinja|model|tiktoken)"
)
_WEIGHTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.safetensors|model\.safetensors\.index\.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """The chat template of a run with its variables, and the system prompt ("" for none).

    `renderer` is the format of the library `renderers` that adds turns in the template's place, such as
    qwen3; "" for none.
    """

    template: str
    variables: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    renderer: str = ""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of the learner's model folder, such as config.json: no code, and weights only with LoRA.

    An actor or rewarder that does not see the folder fetches it by its `name`, and checks `size` and
    `hash`, BLAKE3 in hex.
    """

    name: str
    size: int
    hash: str

    def __post_init__(self) -> None:
        """Raise MalformedMessage for another name than those of `is_shared` and `is_weights`, a size
        over 256 MiB that is not of weights, or a hash that is not 64 hex digits."""
        require(re.fullmatch("[0-9a-f]{64}", self.hash) is not None, "no 64 hex digits:", self.hash)
        weights = is_weights(self.name)
        check_range(
            "the size of a model's file", self.size, 0, LARGEST if weights else LARGEST_SHARED_FILE
        )
        shared = weights or is_shared(self.name)
        require(shared, "a contract names a file that is not shared:", self.name)


@dataclass(frozen=True, slots=True)
class Contract:
    """The settings that actors and rewarders must share with the learner.

    `model` is the folder of the initial weights, and `model_files` are its files without code, and
    without weights unless versions are `adapter`s to them. `tokens_per_sequence` limits prompt plus
    completion.
    `episodes` has the tools and environments, and `chat` what an actor needs to add turns to a prompt.
    With `cast_lm_head_to_fp32` logits are computed in fp32 in a bf16 model too, by learner and actors.
    With `share_device` the actors of the learner's host use the device by turns with it. A ticket whose
    group of rollouts has over `largest_group` bytes is dead.
    """

    model: str
    tokenizer_hash: str
    dtype: str
    tokens_per_sequence: int
    rewards: tuple[RewardSpec, ...]
    filter_zero_std: bool
    groups_per_step: int
    credit: int
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    episodes: EpisodeSpec = field(default_factory=EpisodeSpec)
    chat: ChatSpec | None = None
    model_files: tuple[ModelFile, ...] = ()
    cast_lm_head_to_fp32: bool = False
    share_device: bool = False
    adapter: AdapterSpec | None = None
    largest_group: int = 256 << 20

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless all of the following holds.

        Reward names differ. Names and hashes have at most 200 characters, paths 4096, no NUL. A weight
        is within 1e9 of 0, `groups_per_step`, `credit` and `largest_group` are 1 to 10^15 - 1,
        `tokens_per_sequence` 0 to 2^32 - 2. Options, schemas and variables are plain data: None,
        numbers, texts, lists and maps, for example.
        """
        names = [reward.name for reward in self.rewards]
        check_names("reward", names)
        require(len(set(names)) == len(names), "two rewards have the same name, rename one of:", names)
        for reward in self.rewards:
            check_numbers(f"the weight of reward {reward.name}", [reward.weight], HIGHEST_REWARD)
            check_plain(f"reward {reward.name}, option", reward.options)
            check_paths([reward.source])
        self._check_episodes()
        check_paths([self.model])
        check_names("hash or dtype", [self.tokenizer_hash, self.dtype])
        check_range("tokens_per_sequence", self.tokens_per_sequence, 0, 2 * LARGEST_INT32)
        check_range("groups_per_step", self.groups_per_step, 1, LARGEST)
        check_range("credit", self.credit, 1, LARGEST)
        check_range("largest_group", self.largest_group, 1, LARGEST)

    def _check_episodes(self) -> None:
        """Raise MalformedMessage for tools, environments, agent or template that no setting can have.

        Names have at most 200 characters, paths 4096 and no NUL. `agent_sequences` is 1 to 64. The
        tools' schemas and the template's variables are plain data: texts, numbers, lists and maps, for
        example.
        """
        for code in self.episodes.codes:
            check_names("tool, environment or agent", [code.name])
            check_paths([code.source])
        check_names("column", self.episodes.gold)
        check_range("agent_sequences", self.episodes.agent_sequences, 1, MOST_SEQUENCES)
        check_plain("schemas of the tools of", self.episodes.schemas)
        if self.chat is not None:
            check_plain("the chat template's variables", self.chat.variables)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the weight of each reward by the reward's name, in the contract's order."""
        return {reward.name: reward.weight for reward in self.rewards}

    @property
    def hash(self) -> str:
        """Return the first 16 hex digits of the SHA-256 of this contract's bytes.

        Every ticket carries this hash.
        """
        return hashlib.sha256(encode(self)).hexdigest()[:16]


def is_shared(name: str) -> bool:
    """Return whether a file of this name in a model folder is sent to other hosts.

    Those are the files in the folder itself by whose names transformers and vLLM find configs,
    tokenizers and chat templates: no weights, no code, nothing hidden, and no file of the user's own.
    """
    return _SHARED.fullmatch(name) is not None


def is_weights(name: str) -> bool:
    """Return whether a file of this name in a model folder holds weights, or is their index."""
    return _WEIGHTS.fullmatch(name) is not None


def hash_tokenizer(folder: Path) -> str:
    """Return the SHA-256, as 64 hex digits, of the tokenizer and chat template in a model's folder.

    The names and bytes of tokenizer.json, tokenizer_config.json and chat_template.jinja count. The last
    two may be missing. Raise ConfigError if the folder has no tokenizer.json, OSError if a file cannot
    be read.
    """
    digest = hashlib.sha256()
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"{folder} has no {TOKENIZER_FILES[0]}: copy the learner's model folder there")
    for name in TOKENIZER_FILES:
        path = folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def check_tokenizer(contract: Contract) -> Path:
    """Return `contract.model`, the path of the run's initial model, after a check of its tokenizer.

    Raise ContractMismatch if this host has no such folder, or if the hash of the tokenizer in it is not
    `contract.tokenizer_hash`. Raise ConfigError if the folder has no tokenizer.json.
    """
    folder = Path(contract.model)
    if not os.path.isdir(folder):  # False, where Path.is_dir raises, of a name that is too long
        missing = f"the contract names the model folder {folder}, which does not exist on this host"
        raise ContractMismatch(f"{missing}: share the learner's model folder, or copy it to this path")
    found = hash_tokenizer(folder)
    if found != contract.tokenizer_hash:
        raise ContractMismatch(
            f"the tokenizer in {folder} differs from the learner's: hash {found[:12]} here, "
            f"{contract.tokenizer_hash[:12]} in the contract; copy the learner's model folder"
        )
    return folder


def describe_difference(old: Contract, new: Contract) -> str:
    """Return a line for each field in which two contracts differ, such as "  credit: 8 -> 16".

    The lines are in the order of Contract's fields, joined by line ends. Equal contracts give "".
    """
    before, after = asdict(old), asdict(new)
    changed = [name for name in before if before[name] != after[name]]
    return "\n".join(f"  {name}: {before[name]!r} -> {after[name]!r}" for name in changed)
