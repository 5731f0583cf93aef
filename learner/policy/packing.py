"""Packed rows: which sequences share a row, and the tensors of a row.

A row holds whole sequences one after the other, without padding. The attention keeps the sequences
apart (learner/policy/attention.py). Sequences with the same prompt, such as those of a group, have one
copy of it: only the attention repeats its positions. A row is one forward and backward pass.

Dimensions: L positions of a row, S sequences in it, N completion tokens in it, F tokens of all sequences
with each sequence's prompt counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from penstock.learner.algorithm.batch import TrainSequence


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The rows to gather, `index` (F,), and where the copies of each row are, all int64.

    `order` (F,) and `starts` (L,) are for the gradient. `order` has the places in `index` by row, and
    `starts` where those of each row begin in it. Example: index [2, 0, 2] of L = 3 rows has order [1, 0,
    2] and starts [0, 1, 1].
    """

    index: Tensor
    order: Tensor
    starts: Tensor

    def to(self, device: torch.device) -> "RowIndex":
        """Return the same on the device."""
        return RowIndex(*(moved(part, device) for part in (self.index, self.order, self.starts)))

    def tolist(self) -> list[int]:
        """Return the index as a list."""
        found: list[int] = self.index.tolist()
        return found


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. A copy to a GPU does not wait for what the GPU computes."""
    if device.type != "cuda" or tensor.device.type != "cpu":  # only the CPU's memory can be pinned
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def row_index(index: np.ndarray, rows: int) -> RowIndex:
    """Return the index (F,) of rows of a tensor that has `rows` of them, on the CPU."""
    order = np.argsort(index, kind="stable")
    counts = np.bincount(index, minlength=rows)
    starts = np.cumsum(counts) - counts
    return RowIndex(*(torch.from_numpy(part.astype(np.int64)) for part in (index, order, starts)))


def gather_rows(values: Tensor, index: RowIndex) -> Tensor:
    """Return the rows of `values` (L, ...) that `index` names, in its order, (F, ...)."""
    chosen: Tensor = _GatherRows.apply(values, index)  # type: ignore[no-untyped-call]
    return chosen


class _GatherRows(torch.autograd.Function):
    """The function of `gather_rows`.

    Its gradient adds the copies of a row in the order of their places, in fp32 at least. torch's own
    adds them in any order where several threads or a GPU work on it: two runs would differ.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: RowIndex) -> Tensor:
        """Return the rows that `index` names, and keep what the gradient needs in `ctx`."""
        ctx.index, ctx.shape = index, values.shape
        return values.index_select(0, index.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum over the copies of each row, (L, ...), and None for the index."""
        (gradient,) = gradients
        gradient = gradient.flatten(1) if gradient.dim() > 1 else gradient[:, None]
        total = embedding_bag(ctx.index.order, gradient, ctx.index.starts, mode="sum")
        return total.view(ctx.shape), None


@dataclass(slots=True)
class SharedPrompts:
    """The positions of a row's sequences, for an attention that needs each sequence as a whole.

    Example: a prompt of 2 tokens with completions of 1 and 2 makes L = 5, positions_F
    [0, 1, 2, 0, 1, 3, 4] and first_L [0, 1, 2, 5, 6]. `used` becomes True when an attention used them.
    """

    positions_F: RowIndex  # the position in the row of each token of the sequences
    first_L: RowIndex  # the first place in positions_F of each position of the row
    used: bool = False

    def to(self, device: torch.device) -> "SharedPrompts":
        """Return a copy on the device, not used yet."""
        return SharedPrompts(self.positions_F.to(device), self.first_L.to(device))


@dataclass(frozen=True, slots=True)
class Row:
    """A packed row. Fields with `_N` hold one value per completion token (N,), sequence after sequence.

    Example: prompts of 2 and 3 tokens with completions of 1 and 2 make L = F = 8, N = 3,
    cu_seqlens [0, 3, 8] and predict_N [1, 5, 6].
    """

    input_ids: Tensor  # (1, L), int64
    position_ids: Tensor  # (1, L), int64: the place of each token in its sequence
    cu_seqlens: Tensor  # (S + 1,), int32: the start of each sequence among the F tokens, then F
    max_seqlen: int
    shared: SharedPrompts | None  # None if no two sequences have the same prompt: F is L then
    predict_N: RowIndex  # the position before each completion token, whose hidden state predicts it
    token_ids_N: Tensor  # int64
    temperature_N: Tensor | None  # fp32; None: 1 for all
    behaviour_N: Tensor  # fp32: log-probabilities under the policy that sampled the tokens
    mask_N: Tensor  # bool: whether the token is trained
    staleness_N: Tensor  # int64: how many versions ago the token was sampled
    advantages_N: Tensor  # fp32
    sequence_N: Tensor  # int64: index of the token's sequence in the row
    sequences: int

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Return a Hugging Face model's keyword arguments: the row with its bounds and prompts."""
        return {
            "input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens, "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen, "max_length_k": self.max_seqlen,
            **({"shared_prompts": self.shared} if self.shared else {}),
        }  # fmt: skip


def pack_rows(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the rows, each as the indices of its sequences, packed by first-fit decreasing.

    `lengths` are the sequences' tokens. A row holds at most `budget` tokens; a longer sequence gets a
    row of its own. First-fit decreasing needs at most 11/9 of the fewest possible rows, plus 1 (Yue
    1991). Rows are ordered by their longest sequence, longest first; indices in a row ascend. Equal
    input gives equal output.
    Example:
        >>> pack_rows([3, 9, 3, 5, 12, 3], budget=10)
        [[4], [1], [0, 3], [2, 5]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, free in enumerate(room) if lengths[index] <= free), None)
        if row is None:
            rows.append([])
            room.append(budget)
            row = -1
        rows[row].append(index)
        room[row] -= lengths[index]
    return [sorted(row) for row in rows]


def pack_for_ranks(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Return the rows of each rank (indices of sequences), the same number of rows for every rank.

    `lengths` are the sequences' tokens, `budget` is the most tokens of a row with several sequences.
    `ranks` is at least 1. Indices in a row ascend.

    1. Longest first, each sequence goes to the rank with the fewest tokens. Two ranks then differ by at
       most the longest sequence.
    2. Each rank packs its sequences with `pack_rows`.
    3. A rank with fewer rows than another moves its shortest sequences to rows of their own, or takes
       the shortest sequences of other ranks. All ranks exchange gradients once per row, so a missing row
       would block the other ranks. Empty rows remain only if there are too few sequences.
    4. A rank's rows are ordered longest first, so that the n-th rows of all ranks take a similar time.
    Example:
        >>> pack_for_ranks([8, 4, 3, 2], budget=8, ranks=2)
        [[[0], [2]], [[1], [3]]]
    """
    loads = [0] * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = loads.index(min(loads))
        owned[rank].append(index)
        loads[rank] += lengths[index]
    rows_of_ranks = [
        [sorted(mine[index] for index in row) for row in pack_rows([lengths[i] for i in mine], budget)]
        for mine in owned
    ]
    count = max(len(rows) for rows in rows_of_ranks)
    for rows in rows_of_ranks:
        while len(rows) < count:
            all_rows = [row for mine in rows_of_ranks for row in mine]
            rows.append(_split_off_shortest(rows, lengths) or _split_off_shortest(all_rows, lengths))
    for rows in rows_of_ranks:
        rows.sort(key=lambda row: (-sum(lengths[index] for index in row), row))
    return rows_of_ranks


def _split_off_shortest(rows: list[list[int]], lengths: Sequence[int]) -> list[int]:
    """Remove the shortest sequence that shares a row from that row, and return it as a new row, [index].

    `rows` have the indices of their sequences, `lengths` the tokens of each. If no row has two, return
    [] and change nothing.
    """
    spare = [(lengths[index], index, row) for row in rows if len(row) > 1 for index in row]
    if not spare:
        return []
    _, index, row = min(spare)
    row.remove(index)
    return [index]


def prompt_groups(sequences: Sequence[TrainSequence], budget: int) -> list[list[int]]:
    """Return the indices of `sequences` in groups with the same prompt, in order of appearance.

    A group has at most `budget` tokens, with the prompt of each sequence, unless it is a single
    sequence. A larger group becomes several.
    """
    groups: list[list[int]] = []
    newest: dict[bytes, int] = {}  # the group to which a prompt's next sequence goes
    tokens: list[int] = []
    for index, sequence in enumerate(sequences):
        number = newest.get(sequence.prompt_ids.tobytes())
        if number is None or tokens[number] + sequence.length > budget:
            number = newest[sequence.prompt_ids.tobytes()] = len(groups)
            groups.append([])
            tokens.append(0)
        groups[number].append(index)
        tokens[number] += sequence.length
    return groups


def rows_of_ranks(sequences: Sequence[TrainSequence], budget: int, ranks: int) -> list[list[list[int]]]:
    """Return the rows of each rank, as `pack_for_ranks`, with sequences of one prompt kept together.

    They are kept together as far as a row and a rank's share of all tokens allow. `budget` counts the
    prompt of each sequence, as the attention holds it that often.
    """
    share = sum(sequence.length for sequence in sequences) // ranks
    groups = prompt_groups(sequences, min(budget, share))
    lengths = [sum(sequences[index].length for index in group) for group in groups]
    return [
        [[index for number in row for index in groups[number]] for row in rows]
        for rows in pack_for_ranks(lengths, budget, ranks)
    ]


def token_counts(sequences: Sequence[TrainSequence], packing: bool = True) -> list[tuple[int, int, int]]:
    """Return the lengths of each sequence as FlopCounter takes them.

    With `packing` only the first sequence with a prompt computes it. Example: a prompt of 2 tokens with
    completions of 1 and 3 gives [(3, 3, 1), (5, 3, 3)].
    """
    seen: set[bytes] = set()
    counts = []
    for sequence in sequences:
        prompt, new = sequence.prompt_ids.tobytes(), len(sequence.token_ids)
        counts.append((sequence.length, new if packing and prompt in seen else sequence.length, new))
        seen.add(prompt)
    return counts


def _positions(sequences: Sequence[TrainSequence]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the tokens of a row in parts, and the positions (prompt + T,) of each sequence's tokens.

    The parts are prompts and completions, in the order of the sequences. The first sequence with a
    prompt puts it into the row.
    """
    parts: list[np.ndarray] = []
    starts: dict[bytes, int] = {}
    positions, end = [], 0
    for sequence in sequences:
        prompt, completion = sequence.prompt_ids, sequence.token_ids
        start = starts.setdefault(prompt.tobytes(), end)
        if start == end:
            parts.append(prompt)
            end += len(prompt)
        parts.append(completion)
        own = np.arange(end, end + len(completion))
        positions.append(np.concatenate([np.arange(start, start + len(prompt)), own]))
        end += len(completion)
    return parts, positions


def build_row(sequences: Sequence[TrainSequence], device: torch.device) -> Row:
    """Return the row of one or more sequences in this order, its tensors on the device."""
    lengths = np.array([item.length for item in sequences])
    completions = np.array([len(item.token_ids) for item in sequences])
    tokens, positions = _positions(sequences)
    positions_F = np.concatenate(positions)
    places_F = np.concatenate([np.arange(length) for length in lengths])
    first_L = np.unique(positions_F, return_index=True)[1]

    def joined(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
        """Return the arrays, concatenated and converted to `dtype`, as a tensor on the row's device."""
        return moved(torch.from_numpy(np.concatenate(arrays).astype(dtype)), device)

    def repeated(values: Sequence[float], dtype: type) -> Tensor:
        """Return `values`, one per sequence, repeated for each completion token, (N,), as `dtype`."""
        return joined([np.repeat(np.array(values, dtype=dtype), completions)], dtype)

    before = [
        part[len(item.prompt_ids) - 1 : -1] for part, item in zip(positions, sequences, strict=True)
    ]
    rows, places = len(first_L), len(positions_F)
    shared: SharedPrompts | None = None
    if rows < places:
        shared = SharedPrompts(row_index(positions_F, rows), row_index(first_L, places)).to(device)
    temperatures = [item.temperature for item in sequences]
    return Row(
        input_ids=joined(tokens, np.int64).unsqueeze(0),
        position_ids=joined([places_F[first_L]], np.int64).unsqueeze(0),
        cu_seqlens=joined([np.array([0]), np.cumsum(lengths)], np.int32),
        max_seqlen=int(lengths.max()),
        shared=shared,
        predict_N=row_index(np.concatenate(before), rows).to(device),
        token_ids_N=joined([item.token_ids for item in sequences], np.int64),
        temperature_N=repeated(temperatures, np.float32) if set(temperatures) != {1.0} else None,
        behaviour_N=joined([item.behaviour for item in sequences], np.float32),
        mask_N=joined([item.mask for item in sequences], np.bool_),
        staleness_N=joined([item.staleness for item in sequences], np.int64),
        advantages_N=repeated([item.advantage for item in sequences], np.float32),
        sequence_N=repeated(range(len(sequences)), np.int64),
        sequences=len(sequences),
    )  # fmt: skip
