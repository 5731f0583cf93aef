from __future__ import annotations

import contextlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.errors import MalformedMessage
from penstock.common.wire.codec import decode, encode, pack, unpack
from penstock.common.wire.messages import (
    SCHEMA,
    Group,
    PartialGroup,
    ScoredGroup,
    Span,
    Ticket,
    Verdict,
    Version,
    Weights,
)
from tests.common.builders import make_group, make_messages, make_rollout, make_span, make_ticket

KINDS = (Ticket, Group, PartialGroup, ScoredGroup, Verdict, Weights)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
PLAIN = st.recursive(
    LEAVES | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if is_dataclass(left):
        names = [spec.name for spec in fields(left)]
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in names
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("message", make_messages(), ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    assert same(decode(encode(message), *KINDS), message)


def test_arrays_keep_every_bit() -> None:
    group = make_group()
    found = decode(encode(group), Group).rollouts[0]
    assert found.logprobs.tobytes() == group.rollouts[0].logprobs.tobytes()
    assert found.token_ids.dtype == np.dtype("<i4")


@given(st.binary())
def test_no_bytes_raise_anything_but_malformed_message(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        decode(data, *KINDS)


@given(st.sampled_from([kind.__name__ for kind in KINDS]), PLAIN)
def test_no_plain_data_raise_anything_but_malformed_message(name: str, body: Any) -> None:
    with contextlib.suppress(MalformedMessage):
        decode(pack([SCHEMA, name, body]), *KINDS)


@given(st.sampled_from(make_messages()), st.data())
def test_a_message_with_one_part_replaced_raises_nothing_but_malformed_message(
    message: Any, data: st.DataObject
) -> None:
    envelope = unpack(encode(message))
    part = envelope
    while isinstance(part, list) and part:
        position = data.draw(st.integers(0, len(part) - 1))
        if not isinstance(part[position], list) or data.draw(st.booleans()):
            part[position] = data.draw(PLAIN)
            break
        part = part[position]
    with contextlib.suppress(MalformedMessage):
        decode(pack(envelope), *KINDS)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x81\x90\x01", id="a list as a map's key"),
        pytest.param(b"\x91" * 1000 + b"\xc0", id="a thousand nested lists"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list of four thousand million"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_hostile_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data, *KINDS)


@pytest.mark.parametrize("cut", [1, 10, 50])
def test_a_cut_message_is_malformed(cut: int) -> None:
    with pytest.raises(MalformedMessage):
        decode(encode(make_group())[:-cut], Group)


def body_of(message: object) -> list[Any]:
    return unpack(encode(message))[2]


def test_an_array_cut_within_an_element_is_malformed() -> None:
    body = body_of(make_ticket())
    body[2] = body[2][:-1]
    with pytest.raises(MalformedMessage, match="prompt_ids: expected a whole number of <i4 in 11 bytes"):
        decode(pack([SCHEMA, "Ticket", body]), Ticket)


def test_an_array_shorter_than_its_companions_is_malformed() -> None:
    body = body_of(make_group())
    body[1][0][1] = body[1][0][1][:-4]
    with pytest.raises(MalformedMessage, match="3 tokens, 2 logprobs"):
        decode(pack([SCHEMA, "Group", body]), Group)


def test_another_wire_schema_is_refused_with_what_to_do() -> None:
    with pytest.raises(MalformedMessage, match="one release of penstock everywhere"):
        decode(pack([SCHEMA + 1, "Ticket", body_of(make_ticket())]), Ticket)


def test_another_type_than_expected_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="expected a Group or Verdict, found 'Ticket'"):
        decode(encode(make_ticket()), Group, Verdict)


def test_a_wrong_field_is_named() -> None:
    body = body_of(make_ticket())
    body[4][0] = "hot"
    with pytest.raises(MalformedMessage, match=r"Sampling\.temperature: expected a number"):
        decode(pack([SCHEMA, "Ticket", body]), Ticket)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (make_span(Version(1, 0), 0, 2),),
        (make_span(Version(1, 0), 0, 4),),
        (make_span(Version(1, 0), 1, 3),),
        (make_span(Version(1, 0), 0, 2), make_span(Version(1, 1), 1, 3)),
        (make_span(Version(1, 0), 0, 0), make_span(Version(1, 1), 0, 3)),
    ],
    ids=["none", "short", "long", "late start", "overlap", "empty"],
)
def test_spans_that_do_not_tile_are_malformed(spans: tuple[Span, ...]) -> None:
    good = make_rollout(3)
    with pytest.raises(MalformedMessage, match="span"):
        type(good)(good.token_ids, good.logprobs, good.mask, spans, "stop")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.001, -105.0])
def test_a_log_probability_that_no_sample_has_is_malformed(value: float) -> None:
    good = make_rollout(3)
    logprobs = np.array([-1, value, -1], dtype="<f4")
    with pytest.raises(MalformedMessage, match="expected log-probabilities in"):
        type(good)(good.token_ids, logprobs, good.mask, good.spans, "stop")


@pytest.mark.parametrize("text", ["", "1", "1.", ".2", "1.x", "1.2.3", "-1.2"])
def test_text_that_is_no_version_is_malformed(text: str) -> None:
    with pytest.raises(MalformedMessage):
        Version.parse(text)
