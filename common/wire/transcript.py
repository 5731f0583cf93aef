"""What happened in a rollout of several turns, beside its tokens."""

from dataclasses import dataclass, field
from typing import Any

from penstock.common.text import SHOWN
from penstock.common.wire.limits import (
    HIGHEST_REWARD,
    LARGEST_INT32,
    check_metrics,
    check_numbers,
    check_plain,
    check_range,
    check_texts,
)

FAILED_TOOL = "failed"
"""Key of a tool's message that is True if the call failed."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """The messages after the prompt, the counts of a conversation, and its environment's reward.

    `messages` are those of the assistant, of tools, and of the user if the environment's `reset` gave
    the first observation; of an agent those of its last sequence, with the prompt. `turns` counts
    sampled completions, `tool_calls` the calls that were run or refused (of an agent: that the policy
    wrote), and `tool_failures` those of them that failed. `reward` is what `get_reward` returned, None
    if the environment has no reward; of an agent, what it returned. `failure` is "" unless an
    environment, tool or agent broke; such a rollout has no reward and is not trained. `metrics` are
    further numbers that an agent returned. Raise MalformedMessage for a value out of range.
    """

    messages: tuple[dict[str, Any], ...] = ()
    turns: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    reward: float | None = None
    failure: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise MalformedMessage unless all of the following holds.

        `messages` are plain data. `turns` and `tool_calls` are 0 to 2^31 - 1, `tool_failures` 0 to
        `tool_calls`. `reward` is None or within 1e9 of 0. `failure` has at most 2000 characters.
        `metrics` has at most 1024 numbers within 1e100 of 0, with names of up to 200 characters.
        """
        check_plain("messages of a transcript", {"messages": list(self.messages)})
        for name in ("turns", "tool_calls"):
            check_range(name, getattr(self, name), 0, LARGEST_INT32)
        check_range("tool_failures", self.tool_failures, 0, self.tool_calls)
        check_numbers("the environment's reward", [self.reward], HIGHEST_REWARD)
        check_texts([self.failure], longest=SHOWN)
        check_metrics(self.metrics)
