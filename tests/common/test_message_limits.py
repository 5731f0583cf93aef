"""Every message checks itself when it is built, so what is decoded obeys the same rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from penstock.common.errors import MalformedMessage
from penstock.common.wire import limits
from penstock.common.wire.adapter_spec import AdapterSpec
from penstock.common.wire.codec import decode, encode, pack, unpack
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import (
    SCHEMA,
    ScoredGroup,
    Verdict,
    WeightsFile,
    hash_of_shards,
    shard_names,
)
from penstock.common.wire.plain import find_fault
from penstock.common.wire.reward_spec import RewardSpec
from penstock.common.wire.transcript import Transcript
from tests.common.builders import (
    V0,
    Run,
    make_group,
    make_partial,
    make_rollout,
    make_scored,
    make_sharded,
    make_ticket,
)

CONTRACT = Contract("model", "hash", "float32", 64, (RewardSpec("accuracy"),), True, 2, 8)
VERDICT = Verdict("train:7", "filtered", "all equal", {"accuracy": (1.0, 1.0)}, (3, 5))
NAMED_LONG = "n" * 201
HALF = "a\ud800"


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def changed_ticket(**changes: Any) -> Any:
    return lambda: replace(make_ticket(), **changes)


def changed_sampling(**changes: Any) -> Any:
    return lambda: replace(make_ticket().sampling, **changes)


def changed_rollout(**changes: Any) -> Any:
    return lambda: replace(make_rollout(3), **changes)


def changed_partial(**changes: Any) -> Any:
    """A partial group whose second rollout, which is cut, has these changes."""
    first, second, _ = make_partial().rollouts
    return lambda: replace(make_partial(), rollouts=(first, replace(second, **changes)))


def changed_scored(**changes: Any) -> Any:
    return lambda: replace(make_scored(), **changes)


def changed_verdict(**changes: Any) -> Any:
    return lambda: replace(VERDICT, **changes)


def changed_shards(*shards: WeightsFile, **changes: Any) -> Any:
    """A version with these files, whose hash and size are right unless `changes` has others."""
    hash_, size = hash_of_shards(shards), sum(one.size for one in shards)
    return lambda: replace(make_sharded(), **({"shards": shards, "hash": hash_, "size": size} | changes))


SHARDS = make_sharded().shards
RIGHT = changed_shards(*SHARDS)


def changed_contract(**changes: Any) -> Any:
    return lambda: replace(CONTRACT, **changes)


REFUSED = {
    "temperature infinite": changed_sampling(temperature=np.inf),
    "temperature NaN": changed_sampling(temperature=np.nan),
    "temperature that the engine would raise": changed_sampling(temperature=0.005),
    "temperature over 100": changed_sampling(temperature=100.1),
    "top_k over 31 bits": changed_sampling(top_k=2**31),
    "max_tokens over 31 bits": changed_sampling(max_tokens=2**31),
    "seed over 31 bits": changed_sampling(seed=2**64),
    "a penalty of NaN": changed_sampling(repetition_penalty=np.nan),
    "a penalty of 0": changed_sampling(repetition_penalty=0.0),
    "a negative penalty": changed_sampling(repetition_penalty=-1.0),
    "a penalty over 10": changed_sampling(repetition_penalty=1e30),
    "an empty stop string": changed_sampling(stop=("",)),
    "a long stop string": changed_sampling(stop=("x" * 201,)),
    "half a character in a stop string": changed_sampling(stop=(HALF,)),
    "a thousand stop strings": changed_sampling(stop=("x",) * 1000),
    "an empty choice": changed_sampling(choice=("a", "")),
    "too many choices": changed_sampling(choice=("a",) * 257),
    "a regex and choices": changed_sampling(choice=("a",), regex="b"),
    "a long regex": changed_sampling(regex="a" * 1001),
    "a regex with NUL": changed_sampling(regex="a\0"),
    "a regex of a billion states": changed_sampling(regex="(a{1000}){1000,1000}"),
    "a regex with a count of 900 digits": changed_sampling(regex="a{" + "9" * 900 + "}"),
    "half a character in a regex": changed_sampling(regex=HALF),
    "a partial group without a rollout": lambda: replace(make_partial(), rollouts=()),
    "a partial group of no ticket": lambda: replace(make_partial(), ticket_id="train:07"),
    "tokens of nobody": changed_partial(spans=make_rollout(5).spans),
    "a cut rollout with a prompt": changed_partial(prompt_ids=np.array([1], "<i4")),
    "a cut rollout of several turns": changed_partial(transcript=Transcript()),
    "a cut rollout in a group": lambda: replace(make_group(), rollouts=make_partial().rollouts[:2]),
    "a long name of an actor in a span": changed_rollout(
        spans=tuple(replace(span, actor=NAMED_LONG) for span in make_rollout(3).spans)
    ),
    "a million generations": changed_ticket(num_generations=1_000_000),
    "a negative token in the prompt": changed_ticket(prompt_ids=np.array([1, -1], "<i4")),
    "a prompt of 64 bits": changed_ticket(prompt_ids=np.array([1, 2], "<i8")),
    "a prompt in two dimensions": changed_ticket(prompt_ids=np.array([[1, 2]], "<i4")),
    "min_step over 64 bits": changed_ticket(min_step=2**64),
    "a long contract": changed_ticket(contract=NAMED_LONG),
    "a long column": changed_ticket(columns={NAMED_LONG: 1}),
    "too many columns": changed_ticket(columns={str(n): n for n in range(1025)}),
    "a number as a column's name within": changed_ticket(columns={"a": {1: 2}}),
    "NaN as a key": changed_ticket(columns={"a": [{np.nan: 2}]}),
    "an integer over 64 bits": changed_ticket(columns={"a": 2**64}),
    "a column nested too deep": changed_ticket(columns={"a": nested(33)}),
    "half a character in a column": changed_ticket(columns={"a": [HALF]}),
    "half a character in a column's name": changed_ticket(columns={HALF: 1}),
    "an object in a column": changed_ticket(columns={"a": {"b": object()}}),
    "a negative token": changed_rollout(token_ids=np.array([1, -2, 3], "<i4")),
    "log-probabilities of 64 bits": changed_rollout(logprobs=np.full(3, -1.0)),
    "an unknown finish": changed_rollout(finish_reason="x" * 10_000),
    "a reward over the bound": changed_scored(rewards={"accuracy": (1e100, None)}),
    "a reward that is NaN": changed_scored(rewards={"accuracy": (np.nan, None)}),
    "a reward too few": changed_scored(rewards={"accuracy": (1.0,)}),
    "a long reward": changed_scored(rewards={NAMED_LONG: (1.0, 0.0)}),
    "half a character in a text": changed_scored(texts=("a", HALF)),
    "half a character in a failure": changed_scored(
        rewards={"accuracy": (1.0, None)}, failures=("", HALF)
    ),
    "an extra column nested too deep": changed_scored(extra={"a": (1, nested(33))}),
    "an extra column too short": changed_scored(extra={"a": (1,)}),
    "a metric over the bound": changed_scored(metrics={"a": 1e101}),
    "a metric that is infinite": changed_scored(metrics={"a": np.inf}),
    "a long rewarder": changed_scored(rewarder=NAMED_LONG),
    "a length too few": changed_verdict(lengths=(3,), rewards={"accuracy": (None, 1.0)}),
    "a length of 2^64": changed_verdict(lengths=(3, 2**64)),
    "a length of 0": changed_verdict(lengths=(0, 3)),
    "rewards of two sizes": changed_verdict(rewards={"a": (1.0,), "b": (1.0, 2.0)}),
    "no value of a reward": changed_verdict(rewards={"a": ()}, lengths=()),
    "a verdict's reward over the bound": changed_verdict(rewards={"accuracy": (1e9 * 2, 1.0)}),
    "no reason": changed_verdict(reason=""),
    "a long reason": changed_verdict(reason="x" * 2001),
    "a long failure": changed_scored(rewards={"accuracy": (1.0, None)}, failures=("", "x" * 2001)),
    "half a character in a reason": changed_verdict(reason=HALF),
    "a verdict of another ticket": changed_verdict(ticket_id="train:007"),
    "a weight that is infinite": changed_contract(rewards=(RewardSpec("accuracy", np.inf),)),
    "a reward twice": changed_contract(rewards=(RewardSpec("a"), RewardSpec("a"))),
    "an option nested too deep": changed_contract(rewards=(RewardSpec("a", options={"b": nested(33)}),)),
    "no credit": changed_contract(credit=0),
    "files of a version in another order": changed_shards(SHARDS[1], SHARDS[0], SHARDS[2]),
    "a file of a version twice": changed_shards(SHARDS[0], SHARDS[0], SHARDS[2]),
    "no index": changed_shards(*SHARDS[:2]),
    "an index alone": changed_shards(SHARDS[2]),
    "one file with an index": changed_shards(
        replace(SHARDS[0], name="model-00001-of-00001.safetensors"), SHARDS[2]
    ),
    "a missing file": changed_shards(SHARDS[0], SHARDS[2]),
    "a file elsewhere": changed_shards(replace(SHARDS[0], name=f"../{SHARDS[0].name}"), *SHARDS[1:]),
    "a file of another name": changed_shards(replace(SHARDS[0], name="model.bin"), *SHARDS[1:]),
    "a file's hash that is a path": changed_shards(replace(SHARDS[0], hash="../" * 20), *SHARDS[1:]),
    "a negative size of a file": lambda: replace(SHARDS[0], size=-1),
    "a long name of a file": lambda: replace(SHARDS[0], name=NAMED_LONG),
    "another hash than that of the files": changed_shards(*SHARDS, hash="ab" * 32),
    "another size than that of the files": changed_shards(*SHARDS, size=7),
    "an adapter in several files": changed_shards(*SHARDS, adapter=AdapterSpec(4, 8, ("q_proj",))),
    "too many files": changed_shards(*(WeightsFile(name, 1, "ab" * 32) for name in shard_names(1025))),
    "a version over 15 digits": lambda: replace(V0, step=10**15),
}


def test_a_version_in_several_files_is_a_message() -> None:
    assert RIGHT() == make_sharded()


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_a_value_out_of_range_is_refused_when_the_message_is_built(build: Any) -> None:
    with pytest.raises(MalformedMessage) as caught:
        build()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("message", "place", "value"),
    [
        (VERDICT, (4,), [3]),
        (VERDICT, (4,), [3, 2**63]),
        (VERDICT, (3, "accuracy"), [1e100, 1.0]),
        (make_ticket(), (4, 0), float("inf")),
        (make_ticket(), (3,), 1_000_000),
        (make_ticket(), (5, 1), 2**63),
        (make_ticket(), (8, "level"), nested(40)),
        (make_group(), (1, 0, 1), np.full(3, 0.5, "<f4").tobytes()),
        (make_scored(), (5,), {"a": [1, nested(40)]}),
        (CONTRACT, (7,), 0),
    ],
)
def test_what_is_decoded_obeys_the_same_rules(message: Any, place: tuple, value: Any) -> None:
    name, body = type(message).__name__, unpack(encode(message))[2]
    part = body
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    with pytest.raises(MalformedMessage):
        decode(pack([SCHEMA, name, body]), type(message))


@pytest.mark.parametrize(
    "check",
    [
        lambda: limits.check_range("seed", -1, 0, 9),
        lambda: limits.check_names("column", ["x" * 201]),
        lambda: limits.check_texts([HALF]),
        lambda: limits.check_plain("column", {"a": 2**70}),
        lambda: limits.check_numbers("metric", [float("nan")], 1.0),
    ],
)
def test_an_error_says_where_the_value_is_to_be_corrected(check: Callable[[], None]) -> None:
    with pytest.raises(MalformedMessage, match="correct the setting, file, code or message that"):
        check()


def test_an_error_names_the_place_of_a_fault_in_few_letters():
    schema, name, body = unpack(encode(VERDICT))
    body[3] = {"x" * 5000: "no list"}
    with pytest.raises(MalformedMessage, match=r"Verdict\.rewards\.x+\.\.\.: expected a list") as found:
        decode(pack([schema, name, body]), Verdict)
    assert len(str(found.value)) < 300


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"\x91" * 5000 + b"\xc0", "StackError", id="5000 levels"),
        pytest.param(b"\x91" * 60 + b"\xc0", "nested deeper than 40", id="60 levels"),
        pytest.param(b"\x81\xa1a" * 60 + b"\xc0", "nested deeper than 40", id="60 levels of maps"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", "a key twice", id="a key twice"),
        pytest.param(b"\x81\xa1a\x81\xc4\x01b\x02", "a key is b'b'", id="bytes as a key"),
        pytest.param(b"\x81\x01\x02", "int is not allowed", id="a number as a key"),
        pytest.param(msgpack.packb(msgpack.Timestamp(1)), "Timestamp", id="a time"),
        pytest.param(msgpack.packb(msgpack.ExtType(4, b"a")), "extension type 4", id="a type of others"),
        pytest.param(b"\xa2\xff\xff", "utf-8", id="no UTF-8"),
        pytest.param(b"\xc0\xc0", "extra data", id="two values"),
        pytest.param(b"\xdd\xff\xff\xff\xff\xc0", "max_array_len", id="a claim of 4 billion"),
        pytest.param(
            msgpack.packb([[[]] * 1024] * 4096), "more than 4194304 values", id="four million values"
        ),
    ],
)
def test_bytes_of_more_than_plain_data_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why) as caught:
        unpack(data)
    assert len(str(caught.value)) < 400


def test_the_deepest_columns_come_back_as_they_were() -> None:
    columns = {"a": nested(32), "b": {"c": [float("nan"), b"\xff", -(2**63), 2**64 - 1]}}
    scored = replace(make_scored(), extra={"a": (nested(31), None)})
    ticket = replace(make_ticket(), columns=columns)
    message = replace(scored, group=replace(scored.group, ticket=ticket))
    found = decode(encode(message), ScoredGroup)
    assert repr(found.group.ticket.columns) == repr(columns)
    assert found.extra == {"a": (nested(31), None)}


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"a": [1, {"b": 2**70}]}, "a.1.b: an integer of 71 bits"),
        ({"a": {"b": {1, 2}}}, "a.b: found {1, 2}"),
        ([HALF], "0: a text holds half a character"),
        ({HALF: 1}, "a key is"),
        ([10**5000], "0: an integer of 16610 bits"),
        ({"a" * 10_000: nested(40)}, "nested deeper than 32 levels"),
    ],
)
def test_a_fault_is_named_with_its_place(value: Any, fault: str) -> None:
    found = find_fault(value)
    assert fault in found
    assert len(found) < 500


def test_plain_data_have_no_fault() -> None:
    assert find_fault({"a": [None, True, 1.5, float("nan"), "ä", b"\xff", (1, 2)]}) == ""


def test_a_reason_of_any_form_buries_its_ticket(run: Run) -> None:
    run.issue(1)
    (entry,) = run.actor().take(1)
    assert run.actor().bury(entry, "train", HALF + "x" * 10_000)
    ((_, payload),) = run.entries(run.keys.scored)
    assert decode(payload, Verdict).reason == "a\\ud800" + "x" * 1993
