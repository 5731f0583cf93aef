"""The learner's benchmark at a tiny size: its ways agree, and its report is whole."""

from __future__ import annotations

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
    assert len(table({"speed": speed, "memory": memory}).splitlines()) == 9


def test_memory_is_measured_in_a_process_of_its_own():
    assert _probe_apart(TINY, "chunked") >= 0
