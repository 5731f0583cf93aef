"""The names of versions and tickets: what is an id, and what an id says."""

from __future__ import annotations

import json

import msgpack
import pytest

from penstock.common.errors import MalformedMessage
from penstock.common.wire.ids import TicketId, Version


def test_an_id_says_its_purpose_and_number():
    assert (TicketId.train(7).purpose, TicketId.train(7).number) == ("train", 7)
    asked = TicketId.evaluation(Version(2, 5), 31)
    assert (asked.purpose, asked.number) == ("eval", 31)


def test_an_id_is_its_text_also_on_the_wire():
    asked = TicketId.evaluation(Version(2, 5), 31)
    assert asked == "eval:2.5:31"
    assert {asked: 1}["eval:2.5:31"] == 1
    assert TicketId(str(asked)) == asked
    assert msgpack.packb(asked) == msgpack.packb("eval:2.5:31")
    assert json.dumps({asked: asked}) == '{"eval:2.5:31": "eval:2.5:31"}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "train:",
        "train:-1",
        "train:x",
        "train:7 ",
        "Train:7",
        "eval:7",
        "eval:1.2",
        "train:\u0664",
    ],
)
def test_any_other_text_is_refused(text: str):
    with pytest.raises(MalformedMessage, match="no ticket"):
        TicketId(text)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "1.\u00b2"])
def test_a_text_that_is_no_version_is_refused(text: str):
    with pytest.raises(MalformedMessage, match="no version"):
        Version.parse(text)


def test_a_version_is_what_its_text_says():
    assert Version.parse("2.17") == Version(2, 17)
    assert str(Version(2, 17)) == "2.17"
