"""The run's contract: the settings that all its processes must share, published by the learner."""

import hashlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError, ContractMismatch
from penstock.common.wire.codec import encode
from penstock.common.wire.episode_spec import EpisodeSpec
from penstock.common.wire.ids import LARGEST
from penstock.common.wire.limits import (
    HIGHEST_REWARD,
    LARGEST_INT32,
    LONGEST_PATH,
    MOST_SEQUENCES,
    check_names,
    check_numbers,
    check_plain,
    check_range,
    check_texts,
    require,
)
from penstock.common.wire.reward_spec import Aggregation, RewardSpec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """The chat template of a run with its variables, and the system prompt ("" for none)."""

    template: str
    variables: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = ""


@dataclass(frozen=True, slots=True)
class Contract:
    """The settings that actors and rewarders must share with the learner.

    `model` is the folder of the initial weights. `tokens_per_sequence` limits prompt plus completion.
    `episodes` has the tools and environments, and `chat` what an actor needs to add turns to a prompt.
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

    def __post_init__(self) -> None:
        """Raise MalformedMessage for numbers, names or options that no setting can have."""
        names = [reward.name for reward in self.rewards]
        check_names("reward", names)
        require(
            len(set(names)) == len(names),
            "two rewards have the same name, expected one name each:",
            names,
        )
        for reward in self.rewards:
            check_numbers(f"the weight of reward {reward.name}", [reward.weight], HIGHEST_REWARD)
            check_plain(f"reward {reward.name}, option", reward.options)
            check_texts([reward.source], LONGEST_PATH)
        self._check_episodes()
        check_texts([self.model], LONGEST_PATH)
        check_names("hash or dtype", [self.tokenizer_hash, self.dtype])
        check_range("tokens_per_sequence", self.tokens_per_sequence, 0, 2 * LARGEST_INT32)
        check_range("groups_per_step", self.groups_per_step, 1, LARGEST)
        check_range("credit", self.credit, 1, LARGEST)

    def _check_episodes(self) -> None:
        """Raise MalformedMessage for names, paths, numbers or data of tools that no setting can have."""
        for code in self.episodes.codes:
            check_names("tool, environment or agent", [code.name])
            check_texts([code.source], LONGEST_PATH)
        check_range("agent_sequences", self.episodes.agent_sequences, 1, MOST_SEQUENCES)
        check_plain("schemas of the tools of", self.episodes.schemas)
        if self.chat is not None:
            check_plain("the chat template's variables", self.chat.variables)

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward, by its name."""
        return {reward.name: reward.weight for reward in self.rewards}

    @property
    def hash(self) -> str:
        """The first 16 hex digits of the contract's SHA-256. Every ticket carries this hash."""
        return hashlib.sha256(encode(self)).hexdigest()[:16]


def hash_tokenizer(folder: Path) -> str:
    """Return the SHA-256 of a folder's tokenizer and chat template. Raise ConfigError if it has none."""
    digest = hashlib.sha256()
    if not (folder / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"{folder} has no {TOKENIZER_FILES[0]}: put the learner's model folder there")
    for name in TOKENIZER_FILES:
        path = folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def check_tokenizer(contract: Contract) -> Path:
    """Return the model folder of the contract.

    Raise ContractMismatch if the folder is missing here or its tokenizer differs from the learner's,
    ConfigError if it holds no tokenizer.
    """
    folder = Path(contract.model)
    if not os.path.isdir(folder):  # False, where Path.is_dir raises, of a name that is too long
        found = f"the contract names the model folder {folder}, which does not exist on this host"
        raise ContractMismatch(f"{found}: share or copy the folder")
    found = hash_tokenizer(folder)
    if found != contract.tokenizer_hash:
        raise ContractMismatch(
            f"the tokenizer in {folder} differs from the learner's: hash {found[:12]} here, "
            f"{contract.tokenizer_hash[:12]} in the contract; copy the learner's model folder"
        )
    return folder


def describe_difference(old: Contract, new: Contract) -> str:
    """Return the fields in which two contracts differ, a line each, as "  credit: 8 -> 16"; or ""."""
    before, after = asdict(old), asdict(new)
    changed = [name for name in before if before[name] != after[name]]
    return "\n".join(f"  {name}: {before[name]!r} -> {after[name]!r}" for name in changed)
