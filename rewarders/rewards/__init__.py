"""The rewards that come with Penstock, by name. LEARNER_REWARDS chooses; the choice is in the contract.

A reward has the signature of penstock.rewarders.adapt.Reward and names only the arguments that it reads.
`completions` are texts, `completion_ids` lists of token ids. The gold answer is in the column
`solution`, whatever its name in the data set. docs/rewards.md has a table of all rewards.
"""

from collections.abc import Mapping

from penstock.rewarders.adapt import Reward
from penstock.rewarders.rewards.accuracy import acc, accuracy, base_acc, cosine, length
from penstock.rewarders.rewards.answers import correctness
from penstock.rewarders.rewards.environment import environment
from penstock.rewarders.rewards.form import (
    language_consistency,
    repetition,
    strict_think_answer,
    think_answer,
    xml_tags,
)
from penstock.rewarders.rewards.lengths import soft_overlong

REWARDS: Mapping[str, Reward] = {
    "accuracy": accuracy,
    "acc": acc,
    "base_acc": base_acc,
    "format": think_answer,
    "strict_format": strict_think_answer,
    "xml_tags": xml_tags,
    "correctness": correctness,
    "cosine": cosine,
    "length": length,
    "soft_overlong": soft_overlong,
    "repetition": repetition,
    "language_consistency": language_consistency,
    "environment": environment,
}
