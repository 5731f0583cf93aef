"""In which order questions are asked: a position is the same question whenever it is asked."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from penstock.common.errors import DataError


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in tokens (P,) and the data set's columns."""

    prompt_ids: np.ndarray
    columns: dict[str, Any]


class Questions(Protocol):
    """Questions by their position in the run, over all epochs."""

    def at(self, position: int) -> Question:
        """The question at a position."""

    def __len__(self) -> int:
        """Questions of one epoch; 0 if that is not known."""


class Shuffled:
    """One or several data sets, shuffled anew in each epoch.

    An epoch asks as many questions as there are. With weights each data set has its share of them: a
    small one with a large weight comes round several times before all of a large one were asked.

    Example:
        >>> sets = [[Question(np.array([n]), {"n": n}) for n in range(6)]]
        >>> [Shuffled(sets, [], 0, shuffle=False).at(p).columns["n"] for p in (0, 5, 6)]
        [0, 5, 0]
    """

    def __init__(
        self, sets: Sequence[Sequence[Question]], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        self._sets = sets
        self._seed = seed
        self._shuffle = shuffle
        sizes = [len(one) for one in sets]
        self._shares = share_out(sum(sizes), weights) if weights else sizes
        self._ends = np.cumsum(self._shares)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def at(self, position: int) -> Question:
        """The question at a position, counted on over the epochs."""
        epoch, index = divmod(position, len(self))
        slot = self._order(0, epoch, len(self))[index]
        which = int(np.searchsorted(self._ends, slot, side="right"))
        start = int(self._ends[which]) - self._shares[which]
        one = self._sets[which]
        turn, place = divmod(epoch * self._shares[which] + int(slot) - start, len(one))
        if len(self._sets) == 1:
            return one[place]
        return one[self._order(which + 1, turn, len(one))[place]]

    def _order(self, stream: int, turn: int, size: int) -> np.ndarray:
        return _permutation(self._seed, stream, turn, size) if self._shuffle else np.arange(size)


@lru_cache(maxsize=16)
def _permutation(seed: int, stream: int, turn: int, size: int) -> np.ndarray:
    # Stream 0 draws what a single data set has always drawn: old journals stay readable.
    key = [seed, turn] if stream == 0 else [seed, turn, stream]
    return np.random.default_rng(key).permutation(size)


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to weights, at least 1 each, that add up to a total.

    Example:
        >>> share_out(10, [3.0, 1.0])
        [8, 2]
    """
    ends = np.round(np.cumsum(weights) / np.sum(weights) * total).astype(int)
    return [max(1, int(end - start)) for start, end in zip([0, *ends], ends, strict=False)]


class Streamed:
    """Questions of a stream, in its order; the newest are kept, for what is asked again."""

    KEPT = 20_000

    def __init__(self, open_epoch: Callable[[int], Iterable[Question]], name: str) -> None:
        self._open_epoch = open_epoch
        self._name = name
        self._begin()

    def __len__(self) -> int:
        return 0

    def _begin(self) -> None:
        self._kept: OrderedDict[int, Question] = OrderedDict()
        self._next = self._epoch = 0
        self._rows: Iterator[Question] = iter(self._open_epoch(0))

    def at(self, position: int) -> Question:
        """The question at a position; reads on to it, or again from the start if it lies too far back.

        Raises DataError when the stream has no question at all.
        """
        if position not in self._kept and position < self._next:
            self._begin()
        while position >= self._next:
            self._read_on()
        return self._kept[position]

    def _read_on(self) -> None:
        question = next(self._rows, None)
        if question is None:
            if not self._kept:
                raise DataError(f"{self._name}: the stream has no question")
            self._epoch += 1
            self._rows = iter(self._open_epoch(self._epoch))
            return
        self._kept[self._next] = question
        self._next += 1
        if len(self._kept) > self.KEPT:
            self._kept.popitem(last=False)
