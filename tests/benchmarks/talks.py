"""What the tests of the benchmarks with conversations share."""

from __future__ import annotations

from benchmarks.talk_model import Talk


def texts_of(talk: Talk) -> list[str]:
    """What the model is to write, without end symbols."""
    return [text.removesuffix("<eos>") for text, own in talk if own]
