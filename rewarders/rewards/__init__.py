"""The rewards that come with Penstock, by name. LEARNER_REWARDS chooses; the choice is in the contract.

A reward has TRL's signature (penstock.rewarders.adapt.Reward). For one group it gets G prompts (texts,
or messages where the data set has them), G completions as texts, G lists of token ids, and every column
of the data set as a list of G values. The gold answer is in the column `solution`, whatever its name in
the data set. docs/rewards.md has a table of all rewards.
"""

from collections.abc import Mapping

from penstock.rewarders.adapt import Reward
from penstock.rewarders.rewards.accuracy import acc, accuracy, base_acc, cosine, length
from penstock.rewarders.rewards.correctness import correctness
from penstock.rewarders.rewards.language import language_consistency
from penstock.rewarders.rewards.overlong import soft_overlong
from penstock.rewarders.rewards.repetition import repetition
from penstock.rewarders.rewards.tags import strict_think_answer, think_answer, xml_tags

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
}
