"""Deltas of files of weights: every bit comes back, few bytes are needed, and damage is noticed."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.files.hashing import hash_file
from penstock.common.transfer import delta
from penstock.common.transfer.delta import BadDelta

LARGE = 10**9


def store(folder: Path, name: str, words: np.ndarray) -> Path:
    path = folder / name
    path.write_bytes(words.astype("<u2").tobytes())
    return path


def write_delta(old: Path, new: Path, target: Path, most: int) -> int:
    """Of versions in one file."""
    return delta.write_delta([old], [new], target, most)


def apply_deltas(old: Path, deltas: list[Path], target: Path) -> str:
    """To a version in one file."""
    return delta.apply_deltas([old], deltas, [target])[0]


def make(folder: Path, *versions: np.ndarray) -> tuple[list[Path], list[Path]]:
    """The files of the versions, and the deltas between them."""
    files = [store(folder, f"file-{number}", words) for number, words in enumerate(versions)]
    deltas = []
    for number, (old, new) in enumerate(pairwise(files)):
        deltas.append(folder / f"delta-{number}")
        assert write_delta(old, new, deltas[-1], LARGE) == deltas[-1].stat().st_size
    return files, deltas


def after_an_update(old: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """The words after an Update that changed this share of them by one unit in the last place."""
    draw = np.random.default_rng(seed)
    changed = np.flatnonzero(draw.random(len(old)) < share)
    new = old.copy()
    new[changed] += draw.choice(np.array([1, 0xFFFF], np.uint16), len(changed))
    return new


WORDS = st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40)


@given(WORDS, st.data())
@settings(max_examples=200, deadline=None)
def test_any_words_become_any_others(
    tmp_path_factory: pytest.TempPathFactory, old: list[int], data: st.DataObject
) -> None:
    new = data.draw(st.lists(st.integers(0, 0xFFFF), min_size=len(old), max_size=len(old)))
    folder = tmp_path_factory.mktemp("delta")
    (first, second), deltas = make(folder, np.array(old, np.uint16), np.array(new, np.uint16))
    assert apply_deltas(first, deltas, folder / "made") == hash_file(second)
    assert (folder / "made").read_bytes() == second.read_bytes()


@pytest.mark.parametrize("at", [0, 1, 65534, 65535, 65536, 131070, 131071, 131072, 199_999])
def test_a_change_may_be_far_from_the_one_before(tmp_path: Path, at: int) -> None:
    old = np.zeros(200_000, np.uint16)
    new = old.copy()
    new[at] = 0xFFFF
    (first, second), deltas = make(tmp_path, old, new)
    assert apply_deltas(first, deltas, tmp_path / "made") == hash_file(second)


@pytest.mark.parametrize("words", [1, 3, 4, 7, 8, 9, 16, 17])
def test_files_of_several_blocks_and_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    monkeypatch.setattr(delta, "_WORDS", 8)
    draw = np.random.default_rng(words)
    old = draw.integers(0, 0xFFFF, words).astype(np.uint16)
    (first, second), deltas = make(tmp_path, old, old ^ draw.integers(0, 2, words).astype(np.uint16))
    assert apply_deltas(first, deltas, tmp_path / "made") == hash_file(second)


def test_several_deltas_are_applied_at_once(tmp_path: Path) -> None:
    versions = [np.random.default_rng(0).integers(0, 0xFFFF, 50_000).astype(np.uint16)]
    for seed in range(5):
        versions.append(after_an_update(versions[-1], 0.02, seed))
    files, deltas = make(tmp_path, *versions)
    assert apply_deltas(files[0], deltas, tmp_path / "made") == hash_file(files[-1])
    assert apply_deltas(files[2], deltas[2:], tmp_path / "made") == hash_file(files[-1])


@pytest.mark.parametrize("sizes", [(1, 1), (7, 16, 9), (8, 8, 8), (24, 1, 3)])
def test_a_delta_of_several_files_makes_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(delta, "_WORDS", 8)
    versions = []
    for step in range(3):
        draw = np.random.default_rng(step)
        words = [draw.integers(0, 0xFFFF, size) for size in sizes]
        versions.append([store(tmp_path, f"{step}-{number}", part) for number, part in enumerate(words)])
    deltas = [tmp_path / "first", tmp_path / "second"]
    for pair, found in zip(pairwise(versions), deltas, strict=True):
        assert delta.write_delta(*pair, found, LARGE) == found.stat().st_size
    made = [tmp_path / f"made-{number}" for number in range(len(sizes))]
    hashes = delta.apply_deltas(versions[0], deltas, made)
    assert hashes == [hash_file(file) for file in made] == [hash_file(file) for file in versions[-1]]
    with pytest.raises(BadDelta):
        delta.apply_deltas(versions[0][:-1], deltas, made[:-1])
    assert delta.write_delta(versions[0], versions[1][:-1], tmp_path / "d", LARGE) == 0
    assert delta.write_delta(*versions[:2], tmp_path / "d", 10) == 0


@pytest.mark.parametrize("share", [0.1, 0.01, 0.003, 0.001])
def test_a_change_takes_little_more_than_the_entropy_of_its_place_and_sign(
    tmp_path: Path, share: float
) -> None:
    old = np.random.default_rng(1).integers(0, 0xFFFF, 1 << 22).astype(np.uint16)
    new = after_an_update(old, share)
    _, (found,) = make(tmp_path, old, new)
    of_place = -np.log2(share) - (1 - share) / share * np.log2(1 - share)
    bits = 8 * found.stat().st_size / np.count_nonzero(old != new)
    assert bits < 1.1 * (of_place + 1)


def test_equal_files_make_a_tiny_delta(tmp_path: Path) -> None:
    old = np.random.default_rng(1).integers(0, 0xFFFF, 1 << 20).astype(np.uint16)
    _, (found,) = make(tmp_path, old, old)
    assert found.stat().st_size < 200


def test_there_is_none_for_files_of_other_sizes_or_above_the_limit(tmp_path: Path) -> None:
    old = store(tmp_path, "old", np.arange(1000))
    longer = store(tmp_path, "longer", np.arange(1001))
    other = store(tmp_path, "other", np.random.default_rng(0).integers(0, 0xFFFF, 1000))
    odd = tmp_path / "odd"
    odd.write_bytes(b"123")
    empty = tmp_path / "empty"
    empty.touch()
    assert write_delta(old, longer, tmp_path / "d", LARGE) == 0
    assert write_delta(old, other, tmp_path / "d", 100) == 0
    assert write_delta(odd, odd, tmp_path / "d", LARGE) == 0
    assert write_delta(empty, empty, tmp_path / "d", LARGE) == 0


def damaged(original: bytes, draw: random.Random) -> bytes:
    """The bytes with something else in them, less, or more."""
    kind, at = draw.randrange(4), draw.randrange(len(original))
    if kind == 0:
        return original[:at]
    if kind == 1:
        return original + bytes([draw.randrange(256)])
    if kind == 2:
        return original[:at] + draw.randbytes(4) + original[at + 4 :]
    return original[:at] + bytes([original[at] ^ 1 << draw.randrange(8)]) + original[at + 1 :]


def test_a_damaged_delta_is_noticed_and_writes_nothing_elsewhere(tmp_path: Path) -> None:
    old = np.random.default_rng(1).integers(0, 0xFFFF, 5000).astype(np.uint16)
    (first, _), (found,) = make(tmp_path, old, after_an_update(old, 0.05))
    draw, original, made = random.Random(0), found.read_bytes(), tmp_path / "made"
    refused = 0
    for _ in range(2000):
        found.write_bytes(damaged(original, draw))
        try:
            assert apply_deltas(first, [found], made) == hash_file(made)
            assert made.stat().st_size == first.stat().st_size
        except BadDelta:
            refused += 1
    assert refused > 500


def test_a_delta_for_another_file_is_refused_or_makes_another_one(tmp_path: Path) -> None:
    old = np.random.default_rng(1).integers(0, 0xFFFF, 5000).astype(np.uint16)
    (_, second), (found,) = make(tmp_path, old, after_an_update(old, 0.05))
    wrong = store(tmp_path, "wrong", old[::-1])
    assert apply_deltas(wrong, [found], tmp_path / "made") != hash_file(second)
    with pytest.raises(BadDelta):
        apply_deltas(store(tmp_path, "short", old[:100]), [found], tmp_path / "made")


def test_a_plane_that_says_it_is_huge_is_not_decompressed(tmp_path: Path) -> None:
    import zstandard

    file = store(tmp_path, "file", np.zeros(100))
    bomb = zstandard.compress(bytes(1 << 28))
    head = delta._HEAD.pack(100, len(bomb), 9, 9, 9, 9)
    (tmp_path / "bomb").write_bytes(delta._MAGIC + head + bomb)
    with pytest.raises(BadDelta, match="has a plane"):
        apply_deltas(file, [tmp_path / "bomb"], tmp_path / "made")
