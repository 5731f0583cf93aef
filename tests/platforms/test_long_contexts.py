"""The figures of docs/long-contexts.md are those of its formula, which is the doctor's."""

from __future__ import annotations

import pytest

from penstock.common.config.learner_settings import LearnerSettings
from penstock.deploy.doctor.memory import _learner_bytes
from penstock.deploy.doctor.shape import Shape
from tests.platforms.checks import ROOT

TOKENS = 32_768
GIB = 1 << 30
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "long-contexts.md").read_text().splitlines()
    if line.startswith("| Qwen")
]


def of_doctor(shape: Shape, checkpointing: bool) -> tuple[int, int]:
    """State, and activations with logits, of a learner on a GPU."""
    settings = LearnerSettings(
        model="m", dataset="d", dtype="bfloat16", logprob_chunk=1024, max_prompt_length=TOKENS // 2,
        max_completion_length=TOKENS // 2, gradient_checkpointing=checkpointing,
    )  # fmt: skip
    return _learner_bytes(shape, settings, gpu=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_the_figures_of_its_formula_and_of_the_doctor(row: list[str]) -> None:
    layers, hidden, inner, kv_heads, width, words = map(int, row[1].split(", "))
    tied = row[0] == "Qwen2.5-1.5B"
    shape = Shape(layers, hidden, inner, hidden // width, kv_heads, width, words, tied=tied)
    parts = [
        16 * shape.parameters,
        2 * TOKENS * layers * (10 * hidden + 4 * inner),
        2 * TOKENS * (layers * hidden + 10 * hidden + 4 * inner),
        12 * 1024 * words,
        4 * TOKENS * layers * kv_heads * width,
    ]
    assert row[2:] == [f"{part / GIB:.1f}" for part in parts]
    assert of_doctor(shape, False) == (parts[0], parts[1] + parts[3])
    assert of_doctor(shape, True) == (parts[0], parts[2] + parts[3])


def test_the_table_has_rows():
    assert len(ROWS) == 3
