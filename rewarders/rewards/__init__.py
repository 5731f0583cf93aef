"""The rewards by name. LEARNER_REWARDS chooses among them; the contract carries the choice.

A reward is a pure function with TRL's signature. It gets the G decoded prompts and completions of
one group and, by keyword, every column of the data set as a list of G values; the column with the
gold answer is called `solution`, whatever the data set calls it. It returns G numbers, None for a
completion to which it does not apply. What it raises is a failed scoring, never a low reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rewarders.rewards.accuracy import accuracy
from rewarders.rewards.think_answer import think_answer

Reward = Callable[..., list[Any]]

REWARDS: Mapping[str, Reward] = {"accuracy": accuracy, "format": think_answer}
