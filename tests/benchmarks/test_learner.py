"""The learner's benchmark at a tiny size: its ways agree, and its report is whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.learner import Comparison, Load, _probe_apart, measure_speed, probe, table

TINY = Load(
    layers=1, width=16, heads=2, intermediate=24, vocabulary=50, sequences=9, median=12.0,
    shortest=3, longest=40, completion_share=0.5, micro_batch=4, chunk=5, memory_tokens=20,
)  # fmt: skip


def test_all_ways_compute_the_same_gradient():
    comparison = Comparison(TINY)
    gradients = []
    for way in (comparison.padded_dense, comparison.padded_chunked, comparison.packed_chunked):
        way()
        gradients.append(comparison.gradient().clone())
    dense, *others = gradients
    for other in others:
        assert (other - dense).abs().max() <= 1e-5 * dense.abs().max()


def test_the_report_is_whole():
    speed = measure_speed(TINY, rounds=2)
    memory = {"dense_bytes": probe(TINY, "dense"), "chunked_bytes": probe(TINY, "chunked")}
    assert speed["bound"] == speed["positions_padded"] / speed["positions_packed"] > 1
    report = table({"speed": speed, "memory": memory})
    for row in ("padded_dense", "packed_chunked", f"{speed['bound']:.2f}"):
        assert row in report


@pytest.mark.e2e
def test_dense_logits_need_more_memory_than_chunks_in_a_process_of_their_own():
    larger = replace(TINY, vocabulary=20_000, memory_tokens=1000)
    dense, chunked = (_probe_apart(larger, way) for way in ("dense", "chunked"))
    assert chunked < dense / 4
