"""The order of the questions: a position of the run always names the same question."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.common.errors import DataError


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids (P,), the columns of its row, and the row's place for errors."""

    prompt_ids: NDArray[np.int32]
    columns: dict[str, Any]
    where: str = ""


class Questions(Protocol):
    """Questions by their position in the run. Positions go on over the epochs."""

    def at(self, position: int) -> Question:
        """Return the question at `position`, which counts the run's questions from 0 over all epochs.

        Example: with 40 questions in an epoch, position 40 is the first question of the second epoch.
        Data sets that are not in memory may be read. Raise DataError if such a data set has no question
        or a bad row, ConfigError if the chat template rejects a row.
        """

    def __len__(self) -> int:
        """Return the number of questions in an epoch; 0 if this number is not known."""

    def __iter__(self) -> Iterator[Question]:
        """Yield every question of the data sets once, in their order.

        Raise DataError if a data set that is not in memory is unusable, ConfigError if the chat template
        rejects a row.
        """


class Shuffled:
    """Questions of data sets in memory, in a new random order in each epoch.

    `sets` has the questions of each data set. `seed` fixes all orders. Without `shuffle` each epoch has
    the questions in the order of `sets`. `weights` has one weight per data set; [] stands for their
    sizes. With weights, each data set fills a share of the epoch in proportion to its weight. Sets of 30
    and 10 questions with weights 1 and 3: an epoch of 40 has 10 of the first, and 30 of the second, each
    three times. The other questions of the first set follow in the next epochs.
    """

    def __init__(
        self, sets: Sequence[Sequence[Question]], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        self._sets = sets
        self._seed = seed
        self._shuffle = shuffle
        sizes = [len(one) for one in sets]
        self._shares = split_by_weight(sum(sizes), weights) if weights else sizes
        self._ends: NDArray[np.int64] = np.cumsum(self._shares)

    def __len__(self) -> int:
        """Return the number of questions in an epoch; one that weights repeat counts each time."""
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Question]:
        """Yield every question of all data sets once, unshuffled and whatever their weights."""
        return itertools.chain.from_iterable(self._sets)

    def at(self, position: int) -> Question:
        """Return the question at `position`, which counts the run's questions from 0 over all epochs.

        The same position always gives the same question. Example: with 40 questions in an epoch,
        position 40 is the first question of the second epoch.
        """
        epoch, index = divmod(position, len(self))
        slot = int(self._order(0, epoch, len(self))[index])
        which = int(np.searchsorted(self._ends, slot, side="right"))
        start = int(self._ends[which]) - self._shares[which]
        questions = self._sets[which]
        turn, place = divmod(epoch * self._shares[which] + slot - start, len(questions))
        if len(self._sets) > 1:
            place = int(self._order(which + 1, turn, len(questions))[place])
        return questions[place]

    def _order(self, stream: int, turn: int, size: int) -> NDArray[np.int64]:
        """Return the numbers 0 to `size` - 1 in a random order, or from 0 on if nothing is shuffled.

        `stream` 0 orders the places of the epoch `turn`. `stream` 1 + k orders the questions of data
        set k, all of which have been asked `turn` times before. The same arguments give the same order.
        """
        return _permutation(self._seed, stream, turn, size) if self._shuffle else np.arange(size)


@lru_cache(maxsize=16)
def _permutation(seed: int, stream: int, turn: int, size: int) -> NDArray[np.int64]:
    """Return the numbers 0 to `size` - 1 in a random order that the arguments determine.

    A later call with the same arguments may return the same array: do not change it. `stream` (0 and up)
    and `turn` (from 0) select one of the orders of `seed`.
    """
    # Stream 0 has the key of releases before the weights: a replay of their journals needs their order.
    key = [seed, turn] if stream == 0 else [seed, turn, stream]
    return np.random.default_rng(key).permutation(size)


def split_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Return a whole number per weight, in proportion to the weights (above 0), each at least 1.

    The numbers add up to `total`, unless one was raised from 0 to 1.

    Example:
        >>> split_by_weight(10, [3.0, 1.0])
        [8, 2]
    """
    ends = np.round(np.cumsum(weights) / np.sum(weights) * total).astype(int)
    return [max(1, int(end - start)) for start, end in zip([0, *ends], ends, strict=False)]


class Streamed:
    """Questions of a stream, in its order. The newest 20,000 (KEPT) stay in memory.

    `open_epoch` returns the questions of an epoch, counted from 0, when it is called. `name` is the data
    set's, for errors. Nothing is read yet. Tickets that are issued again ask for recent positions, which
    are in memory. For an older position the stream is read again from its beginning.
    """

    KEPT = 20_000

    def __init__(self, open_epoch: Callable[[int], Iterable[Question]], name: str) -> None:
        self._open_epoch = open_epoch
        self._name = name
        self._kept: dict[int, Question] = {}
        self._questions = self._numbered()

    def __len__(self) -> int:
        """Return 0, which stands for an unknown number of questions."""
        return 0

    def __iter__(self) -> Iterator[Question]:
        """Yield the questions of the first epoch, reading the data set from its beginning.

        Raise DataError for an unreadable data set or a bad row, ConfigError if the chat template rejects
        a row.
        """
        return iter(self._open_epoch(0))

    def at(self, position: int) -> Question:
        """Return the question at `position`, which counts the run's questions from 0 over all epochs.

        A newer position than those read is reached by reading on; the questions on the way are kept, and
        only the newest 20,000 of all. A position before these is reached by reading from the first row
        of the first epoch again, and the kept ones are dropped. Raise DataError if the stream has no
        question, cannot be read or has a bad row, ConfigError if the chat template rejects a row. After
        an error a later call reads again.
        """
        if position not in self._kept and position < next(reversed(self._kept), 0):
            self._start_over()
        while position not in self._kept:
            try:
                number, question = next(self._questions)
            except BaseException:  # the generator has ended by it
                self._start_over()
                raise
            self._kept[number] = question
            self._kept.pop(number - self.KEPT, None)
        return self._kept[position]

    def _start_over(self) -> None:
        """Drop the kept questions, and read from the first row of the first epoch when next asked."""
        self._kept.clear()
        self._questions = self._numbered()

    def _numbered(self) -> Iterator[tuple[int, Question]]:
        """Yield pairs of position and question, epoch after epoch without end, positions from 0 on.

        Raise DataError if the first epoch has no question, and for an unreadable data set or a bad row.
        Raise ConfigError if the chat template rejects a row.
        """
        position = 0
        for epoch in itertools.count():
            for question in self._open_epoch(epoch):
                yield position, question
                position += 1
            if position == 0:
                remedy = "Name another data set in LEARNER_DATASET, or raise LEARNER_MAX_PROMPT_LENGTH"
                raise DataError(
                    f"{self._name}: no row gave a question of a length allowed, expected one. {remedy}"
                )
