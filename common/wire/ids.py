"""The names of policy versions and of tickets, in one text form each."""

import re
from dataclasses import dataclass
from typing import Literal, Self

from penstock.common.errors import MalformedMessage
from penstock.common.wire.plain import brief

Purpose = Literal["train", "eval"]

LARGEST = 10**15 - 1
"""The largest number in a version or ticket. The server's scripts count exactly up to 2^53."""

_NUMBER = r"(0|[1-9][0-9]{0,14})"  # one form for each number: 07 would be another ticket than 7
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}")
_TICKET = re.compile(rf"train:{_NUMBER}|eval:{_NUMBER}\.{_NUMBER}:{_NUMBER}")


def is_number(text: str) -> bool:
    """Return whether `text` is a number as Penstock writes it: 7, but not 07, +7 or one of 16 digits."""
    return re.fullmatch(_NUMBER, text) is not None


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version of the policy: the learner's incarnation and the number of Updates made so far.

    Example: 2.7 is the policy after seven Updates, the last of them made by incarnation 2. An Update
    trains one batch; it may take several steps of the optimizer.
    """

    incarnation: int
    step: int

    def __post_init__(self) -> None:
        """Raise MalformedMessage if `incarnation` or `step` is negative or has more than 15 digits."""
        if not (0 <= self.incarnation <= LARGEST and 0 <= self.step <= LARGEST):
            parts = f"{brief(self.incarnation)}.{brief(self.step)}"
            found = f"version {parts}: expected numbers from 0 to {LARGEST}"
            raise MalformedMessage(f"{found}: correct the file or message that names it")

    def __str__(self) -> str:
        """Return INCARNATION.STEP, such as 2.7."""
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the version that `text` names as INCARNATION.STEP, such as "2.7".

        Raise MalformedMessage for any other text, such as "02.7" or a number of more than 15 digits.
        """
        found = _VERSION.fullmatch(text)
        if found is None:
            raise MalformedMessage(f"{brief(text)} is no version: write INCARNATION.STEP, such as 2.7")
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
        """Return `text` as an id. Raise MalformedMessage unless it is as "train:7" or "eval:1.4:2".

        A number has at most 15 digits, and none but 0 begins with 0.
        """
        if _TICKET.fullmatch(text) is None:
            form = "write train:NUMBER or eval:VERSION:INDEX, such as train:7 or eval:1.4:2"
            raise MalformedMessage(f"{brief(text)} is no ticket: {form}")
        return super().__new__(cls, text)

    @classmethod
    def train(cls, number: int) -> Self:
        """Return "train:NUMBER", the id of the training ticket `number`.

        Raise MalformedMessage if `number` is negative or has more than 15 digits.
        """
        return cls(f"train:{number}")

    @classmethod
    def evaluation(cls, version: Version, index: int) -> Self:
        """Return the id "eval:VERSION:INDEX" of the ticket that asks `version` a held-out question.

        `index` is the question's place, from 0 on. Raise MalformedMessage for a negative `index` or one
        of more than 15 digits.
        """
        return cls(f"eval:{version}:{index}")

    @property
    def purpose(self) -> Purpose:
        """Return "train" for the id of a training ticket, "eval" for that of an evaluation ticket."""
        return "train" if self.startswith("train:") else "eval"

    @property
    def number(self) -> int:
        """Return the number of a training ticket, or the index of an evaluation ticket's question."""
        return int(self.rpartition(":")[2])
