"""A short form of `python -m tests.fuzz`: every mutated message and file is refused or harmless."""

from __future__ import annotations

import pytest

from tests.fuzz.run import log_nothing, memory_folder, run_cases


@pytest.mark.parametrize(
    ("kind", "count", "seen"),
    [("message", 1_500, "message: intake stale"), ("file", 250, "file: rewritten journal refused")],
)
def test_every_mutation_is_refused_or_harmless(kind, count, seen):
    log_nothing()
    with memory_folder() as folder:
        counts, faults = run_cases(kind, 1, range(count), folder)
    assert not faults, "\n".join(map(str, faults[:5]))
    assert counts[seen] > 10
