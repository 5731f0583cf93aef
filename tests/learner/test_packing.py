"""Packing: every sequence once, within budget, evenly shared; and the tensors of a row."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import ceil, floor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.learner.algorithm.batch import TrainSequence
from penstock.learner.policy.packing import (
    Row,
    build_row,
    gather_rows,
    moved,
    pack_for_ranks,
    pack_rows,
    prompt_groups,
    row_index,
    rows_of_ranks,
    token_counts,
)
from penstock.learner.policy.reference import _row_on

BUDGET = 60
lengths_lists = st.lists(st.integers(1, 80), max_size=40)
"""Some exceed the budget."""
fitting_lists = st.lists(st.integers(1, BUDGET), min_size=1, max_size=40)


def tokens(rows: list[list[int]], lengths: list[int]) -> int:
    return sum(lengths[index] for row in rows for index in row)


def fewest_rows(lengths: list[int], budget: int) -> int:
    """By trying everything."""
    if not lengths:
        return 0
    first, rest = lengths[0], range(1, len(lengths))
    best = len(lengths)
    for size in range(len(lengths)):
        for others in combinations(rest, size):
            if first + sum(lengths[index] for index in others) <= budget:
                left = [lengths[index] for index in rest if index not in others]
                best = min(best, 1 + fewest_rows(left, budget))
    return best


@given(lengths_lists)
def test_every_sequence_is_packed_once_and_no_row_is_too_long(lengths):
    rows = pack_rows(lengths, BUDGET)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row == sorted(row) and row for row in rows)
    assert all(tokens([row], lengths) <= BUDGET or len(row) == 1 for row in rows)


@given(st.lists(st.integers(1, 20), max_size=6))
def test_rows_are_few(lengths):
    fewest = fewest_rows(lengths, 20)
    assert fewest <= len(pack_rows(lengths, 20)) <= floor(11 / 9 * fewest + 6 / 9)


@given(fitting_lists)
def test_no_two_rows_could_have_been_one(lengths):
    rows = pack_rows(lengths, BUDGET)
    for one, other in combinations(rows, 2):
        assert tokens([one, other], lengths) > BUDGET


def test_long_tailed_lengths_leave_little_room():
    random = np.random.default_rng(0)
    lengths = [int(length) for length in random.lognormal(5, 1, 256).clip(2, 2048)]
    assert len(pack_rows(lengths, 4096)) <= ceil(sum(lengths) / 4096) + 1


def test_equal_input_gives_equal_rows_in_a_known_order():
    assert pack_rows([3, 9, 3, 5, 12, 3], 10) == [[4], [1], [0, 3], [2, 5]]
    assert pack_rows([], 10) == []


@given(lengths_lists, st.integers(1, 5))
def test_a_share_holds_every_sequence_once_within_budget_in_equally_many_rows(lengths, ranks):
    shares = pack_for_ranks(lengths, BUDGET, ranks)
    rows = [row for mine in shares for row in mine]
    assert len(shares) == ranks
    assert len({len(mine) for mine in shares}) == 1
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(tokens([row], lengths) <= BUDGET or len(row) == 1 for row in rows if row)
    assert shares == pack_for_ranks(list(lengths), BUDGET, ranks)


@given(lengths_lists, st.integers(1, 5))
def test_rows_are_empty_only_if_sequences_are_too_few(lengths, ranks):
    shares = pack_for_ranks(lengths, BUDGET, ranks)
    rows = [row for mine in shares for row in mine]
    if not all(rows):
        assert len(lengths) < len(rows)
        assert max(len(row) for row in rows) == 1
    for mine in shares:
        totals = [tokens([row], lengths) for row in mine]
        assert totals == sorted(totals, reverse=True)


@given(fitting_lists, st.integers(1, 5))
def test_ranks_differ_by_at_most_the_longest_sequence(lengths, ranks):
    """With a budget that one row never exceeds, so that no rank has to give away sequences."""
    loads = [tokens(mine, lengths) for mine in pack_for_ranks(lengths, sum(lengths), ranks)]
    assert max(loads) - min(loads) <= max(lengths)


@given(fitting_lists, st.integers(1, 5))
def test_a_rank_with_enough_sequences_keeps_its_own(lengths, ranks):
    shares = pack_for_ranks(lengths, BUDGET, ranks)
    whole = [
        sorted(index for row in rows for index in row) for rows in pack_for_ranks(lengths, 10**6, ranks)
    ]
    found = [sorted(index for row in rows for index in row) for rows in shares]
    if all(len(mine) >= len(shares[0]) for mine in whole):
        assert found == whole


@given(fitting_lists, st.integers(1, 5))
def test_giving_sequences_away_costs_little_balance(lengths, ranks):
    loads = [tokens(mine, lengths) for mine in pack_for_ranks(lengths, BUDGET, ranks)]
    assert max(loads) - min(loads) <= 2 * max(lengths)


@pytest.mark.parametrize("ranks", [2, 8])
def test_long_tailed_lengths_are_shared_within_a_percent(ranks):
    random = np.random.default_rng(1)
    lengths = [int(length) for length in random.lognormal(5, 1, 512).clip(2, 2048)]
    shares = pack_for_ranks(lengths, 4096, ranks)
    loads = [tokens(mine, lengths) for mine in shares]
    assert max(loads) <= 1.01 * sum(lengths) / ranks
    assert len(shares[0]) <= ceil(sum(lengths) / 4096 / ranks) + 1


def test_a_rank_with_one_giant_gets_short_ones_rather_than_empty_rows():
    shares = pack_for_ranks([1000, *[20] * 12], 40, 2)
    assert [len(mine) for mine in shares] == [6, 6]
    assert all(row for mine in shares for row in mine)


def make_sequence(prompt: int, completion: int, seed: int) -> TrainSequence:
    random = np.random.default_rng(seed)
    return TrainSequence(
        prompt_ids=random.integers(3, 30, prompt).astype(np.int32),
        token_ids=random.integers(3, 30, completion).astype(np.int32),
        behaviour=random.normal(-3, 1, completion).astype(np.float32),
        mask=random.random(completion) < 0.5,
        staleness=random.integers(0, 3, completion),
        advantage=float(random.normal()),
        temperature=0.5 + seed,
    )


def check_token(row: Row, item: TrainSequence, start: int, token: int, place: int) -> None:
    """The N-th completion token of a row is this sequence's."""
    assert row.predict_N.index[place] == start + len(item.prompt_ids) + token - 1
    assert (
        row.input_ids[0, row.predict_N.index[place] + 1]
        == row.token_ids_N[place]
        == item.token_ids[token]
    )
    assert row.behaviour_N[place] == item.behaviour[token]
    assert row.mask_N[place] == item.mask[token]
    assert row.staleness_N[place] == item.staleness[token]
    assert row.advantages_N[place] == np.float32(item.advantage)
    assert row.temperature_N[place] == np.float32(item.temperature)


@pytest.mark.parametrize("shapes", [[(3, 4), (1, 1), (5, 2)], [(2, 6)], [(2, 0), (1, 3)], [(3, 0)]])
def test_a_row_is_its_sequences_end_to_end(shapes):
    items = [make_sequence(*shape, seed=n) for n, shape in enumerate(shapes)]
    row = build_row(items, torch.device("cpu"))
    start = place = 0
    for number, item in enumerate(items):
        whole = np.concatenate([item.prompt_ids, item.token_ids])
        end = start + item.length
        assert row.input_ids[0, start:end].tolist() == whole.tolist()
        assert row.position_ids[0, start:end].tolist() == list(range(item.length))
        assert row.cu_seqlens[number : number + 2].tolist() == [start, end]
        for token in range(len(item.token_ids)):
            assert row.sequence_N[place] == number
            check_token(row, item, start, token, place)
            place += 1
        start = end
    assert row.input_ids.shape == row.position_ids.shape == (1, start)
    assert len(row.predict_N.index) == place
    assert row.max_seqlen == max(item.length for item in items)
    assert row.sequences == len(items)


def with_prompt(item: TrainSequence, prompt: list[int]) -> TrainSequence:
    return replace(item, prompt_ids=np.array(prompt, dtype=np.int32))


def test_sequences_with_the_same_prompt_have_one_copy_of_it():
    prompts = [[5, 6], [7], [5, 6], [5, 6]]
    items = [with_prompt(make_sequence(1, new, n), prompts[n]) for n, new in enumerate((1, 2, 2, 0))]
    row = build_row(items, torch.device("cpu"))
    one, two, three, _ = (item.token_ids.tolist() for item in items)
    assert row.input_ids[0].tolist() == [5, 6, *one, 7, *two, *three]
    assert row.position_ids[0].tolist() == [0, 1, 2, 0, 1, 2, 2, 3]
    assert row.cu_seqlens.tolist() == [0, 3, 6, 10, 12]
    assert row.shared is not None
    assert row.shared.positions_F.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 0, 1]
    assert row.shared.first_L.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert row.predict_N.tolist() == [1, 3, 4, 1, 6]
    assert row.token_ids_N.tolist() == [*one, *two, *three]
    assert row.sequence_N.tolist() == [0, 1, 1, 2, 2]
    assert row.max_seqlen == 4


def test_groups_of_one_prompt_stay_within_the_budget():
    prompts = [[5, 6], [7], [5, 6], [5, 6], [7], [5, 6]]
    items = [with_prompt(make_sequence(1, 3, n), prompts[n]) for n in range(6)]
    assert prompt_groups(items, 100) == [[0, 2, 3, 5], [1, 4]]
    assert prompt_groups(items, 10) == [[0, 2], [1, 4], [3, 5]]
    assert prompt_groups(items, 1) == [[n] for n in range(6)]
    assert rows_of_ranks(items, 18, 1) == [[[0, 2, 3], [1, 4, 5]]]


def test_a_group_is_split_where_ranks_would_be_idle():
    items = [with_prompt(make_sequence(1, 5, n), [5 + n // 4, 6]) for n in range(8)]
    assert rows_of_ranks(items, 100, 1) == [[list(range(8))]]
    assert rows_of_ranks(items, 100, 2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    for ranks in (3, 4, 7, 8):
        shares = rows_of_ranks(items, 100, ranks)
        counts = [sum(map(len, rows)) for rows in shares]
        assert sum(counts) == 8
        assert min(counts) >= 1, "a rank computes nothing"


def test_picked_rows_have_the_gradient_of_an_index_in_every_run():
    random = np.random.default_rng(0)
    index = random.integers(0, 40, 900)
    values = torch.from_numpy(random.normal(size=(41, 128)).astype(np.float32)).requires_grad_()
    weights = torch.from_numpy(random.normal(size=(900, 128)).astype(np.float32))
    asked = row_index(index, 41)
    assert sorted(asked.order.tolist()) == list(range(900))
    assert torch.equal(asked.index[asked.order], asked.index.sort().values)
    assert torch.equal(gather_rows(values, asked), values[torch.from_numpy(index)])
    (expected,) = torch.autograd.grad((values.double()[torch.from_numpy(index)] * weights).sum(), values)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)  # with the index, 40 of 40 gradients differ
    try:
        found = [
            torch.autograd.grad((gather_rows(values, asked) * weights).sum(), values)[0]
            for _ in range(40)
        ]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0] - expected).abs().max() < 1e-4
    (low,) = torch.autograd.grad((gather_rows(values.bfloat16(), asked) * weights).sum(), values)
    assert (low - expected).abs().max() < 0.02 * expected.abs().max()


def test_values_of_one_dimension_have_a_gradient_too():
    values = torch.arange(3.0, requires_grad=True)
    (
        gather_rows(values, row_index(np.array([2, 0, 2]), 3)) * torch.tensor([1.0, 2.0, 3.0])
    ).sum().backward()
    assert values.grad.tolist() == [2.0, 0.0, 4.0]


def test_nothing_is_picked_from_an_empty_index():
    asked = row_index(np.zeros(0, dtype=np.int64), 3)
    values = torch.ones(3, 2, requires_grad=True)
    gather_rows(values, asked).sum().backward()
    assert values.grad.tolist() == [[0, 0]] * 3


class OnDevice:
    """A tensor on a device that this machine may not have."""

    def __init__(self, device, pinned=False):
        self.device, self.pinned = torch.device(device), pinned

    def pin_memory(self):
        assert self.device.type == "cpu", "torch refuses to pin another device's memory"
        return OnDevice("cpu", pinned=True)

    def to(self, device, non_blocking=False):
        assert not non_blocking or self.pinned, "the copy would be of memory that is in use"
        return OnDevice(device)


def test_only_memory_of_the_cpu_is_pinned_on_its_way_to_a_gpu():
    for start, end in (("cpu", "cuda"), ("cuda", "cuda:1"), ("cuda", "cpu"), ("cpu", "cpu")):
        assert moved(OnDevice(start), torch.device(end)).device == torch.device(end)


def test_a_row_is_moved_with_all_of_its_tensors():
    items = [with_prompt(make_sequence(1, 2, n), [5, 6]) for n in range(2)]
    row = build_row(items, torch.device("cpu"))
    row.shared.used = True
    there = _row_on(row, torch.device("meta"))
    tensors = [there.input_ids, there.mask_N, there.predict_N.index, there.shared.first_L.index]
    tensors += [there.shared.positions_F.order, there.shared.positions_F.starts]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert not there.shared.used


def test_a_prompt_is_counted_with_the_first_sequence_that_has_it():
    items = [with_prompt(make_sequence(1, new, new), [5, 6]) for new in (1, 3)]
    assert token_counts(items) == [(3, 3, 1), (5, 3, 3)]
    assert token_counts(items, packing=False) == [(3, 3, 1), (5, 5, 3)]


@pytest.mark.parametrize(
    ("heats", "kept"), [((1.0, 1.0), False), ((1.0, 0.5), True), ((0.5, 0.5), True)]
)
def test_a_temperature_of_one_for_all_is_left_out(heats, kept):
    sequences = [replace(make_sequence(2, 3, seed), temperature=heats[seed]) for seed in (0, 1)]
    row = build_row(sequences, torch.device("cpu"))
    assert (row.temperature_N is not None) == kept


def test_a_rows_tensors_have_the_documented_dtypes():
    row = build_row([make_sequence(2, 3, 0), make_sequence(2, 0, 1)], torch.device("cpu"))
    dtypes = {
        name: getattr(row, name).dtype
        for name in Row.__dataclass_fields__
        if name[-1] == "N" and name != "predict_N"
    }
    assert dtypes == {
        "token_ids_N": torch.int64, "sequence_N": torch.int64,
        "staleness_N": torch.int64, "mask_N": torch.bool, "temperature_N": torch.float32,
        "behaviour_N": torch.float32, "advantages_N": torch.float32,
    }  # fmt: skip
    assert row.cu_seqlens.dtype == torch.int32
    assert row.input_ids.dtype == row.position_ids.dtype == torch.int64
