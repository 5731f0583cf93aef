"""The names of policy versions and of tickets, in one text form each."""

import re
from dataclasses import dataclass
from typing import Literal, Self

from penstock.common.errors import MalformedMessage

Purpose = Literal["train", "eval"]

_N = "(?:0|[1-9][0-9]{0,14})"  # only the text that str() gives, and no number that a float cannot hold
_VERSION = re.compile(rf"({_N})\.({_N})")
_TICKET = re.compile(rf"train:{_N}|eval:{_N}\.{_N}:{_N}")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version of the policy: the learner's incarnation and the number of Updates made so far.

    Example: 2.7 is the policy after seven Updates, the last of them made by incarnation 2. An Update
    trains one batch; it may take several steps of the optimizer.
    """

    incarnation: int
    step: int

    def __post_init__(self) -> None:
        """Raise MalformedMessage if a part is negative."""
        if self.incarnation < 0 or self.step < 0:
            raise MalformedMessage(f"version {self}: a version has no negative part")

    def __str__(self) -> str:
        """Return INCARNATION.STEP, such as 2.7."""
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the version written as this text. Raise MalformedMessage for any other text."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise MalformedMessage(f"{text!r} is no version: expected INCARNATION.STEP, such as 2.7")
        return cls(int(found[1]), int(found[2]))


class TicketId(str):
    """The id of a ticket: "train:{number}", or "eval:{version}:{index of the held-out question}".

    An id is a string of a checked form, so it equals and hashes as its text. Raise MalformedMessage
    for any other text.

    Example:
        >>> TicketId("train:7").number, TicketId.evaluation(Version(1, 4), 2)
        (7, 'eval:1.4:2')
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Check the text and return it as an id. Raise MalformedMessage for a text of another form."""
        if _TICKET.fullmatch(text) is None:
            raise MalformedMessage(
                f"{text!r} is no ticket: expected train:NUMBER or eval:VERSION:INDEX, such as train:7"
            )
        return super().__new__(cls, text)

    @classmethod
    def train(cls, number: int) -> Self:
        """Return the id of the training ticket `number`. Raise MalformedMessage if it is negative."""
        return cls(f"train:{number}")

    @classmethod
    def evaluation(cls, version: Version, index: int) -> Self:
        """Return the id of the ticket that asks a version held-out question `index`, from 0 on."""
        return cls(f"eval:{version}:{index}")

    @property
    def purpose(self) -> Purpose:
        """Return "train" for the id of a training ticket, "eval" for that of an evaluation ticket."""
        return "train" if self.startswith("train:") else "eval"

    @property
    def number(self) -> int:
        """Return the number of a training ticket, or the index of an evaluation ticket's question."""
        return int(self.rpartition(":")[2])
