"""What the users of a run can write into a running one: the injections of docs/security.md, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.common.broker.connection import Argument, Connection
from penstock.common.wire.codec import encode, pack, unpack
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Ticket, Verdict, Weights
from tests.learner.builders import make_group
from tests.learner.injected_run import KEYS, InjectedRun, Stage, honest
from tests.learner.test_refusal import Forge, of_rollouts, of_sampling, of_ticket, one_more, spans

Write = Callable[[InjectedRun, Connection], object]
Injection = tuple[Stage, Write]

V0 = Version(1, 0)
TRAIN, EVAL, OTHER = TicketId.train(2), TicketId.evaluation(V0, 1), TicketId.train(1)
UNKNOWN = TicketId.train(999)
LARGEST = "18446744073709551615-18446744073709551615"
NEST = b"\x91" * 1_000_000
FORGED = "forger"


# Ways to write


def write(*words: Argument, stage: Stage = "issued") -> Injection:
    """A command on the run's keys, which stand in braces, as do train:2's place, entry and version."""

    def send(run: InjectedRun, by: Connection) -> object:
        known = run.known()
        first, *rest = [word.format(**known) if isinstance(word, str) else word for word in words]
        return by.execute(str(first), *rest)

    return stage, send


def fcall(name: str, keys: str, *args: Argument, stage: Stage = "issued") -> Injection:
    """A call of a server function; `keys` are their names in a row."""
    named = [f"{{{key}}}" for key in keys.split()]
    return write("FCALL", f"penstock_4_{name}", len(named), *named, *args, stage=stage)


def all_of(*writes: Injection) -> Injection:
    """Several writes at the first one's stage, in order."""

    def send(run: InjectedRun, by: Connection) -> None:
        for _, each in writes:
            each(run, by)

    return writes[0][0], send


def entry(stream: str, data: bytes | Callable[[InjectedRun], bytes], ticket: str = TRAIN) -> Injection:
    """An entry for a ticket on a stream."""

    def send(run: InjectedRun, by: Connection) -> object:
        payload = data if isinstance(data, bytes) else data(run)
        return by.execute("XADD", getattr(KEYS, stream), "*", "t", ticket, "d", payload)

    return "issued", send


def forged(ticket: Ticket, forge: Forge) -> bytes:
    """A scored group as the ticket asks for, then altered, by an unknown rewarder."""
    return encode(replace(forge(honest(ticket)), rewarder=FORGED))


def scored(forge: Forge) -> Injection:
    """A forged answer to train:2."""
    return entry("scored", lambda run: forged(run.ask(TRAIN), forge))


def evaluated(forge: Forge) -> Injection:
    """A forged answer to a held-out question."""
    return entry("evaluated", lambda run: forged(run.ask(EVAL), forge), EVAL)


def altered(*path: int | str, value: Any) -> Injection:
    """An answer to train:2 with a value that the message's own class would refuse to build."""

    def make(run: InjectedRun) -> bytes:
        message = unpack(encode(honest(run.ask(TRAIN))))
        part: Any = message
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        return pack(message)

    return entry("scored", make)


def verdict(state: Any, ticket: TicketId = TRAIN) -> Injection:
    """A forged verdict as train:2's answer, perhaps of another ticket."""
    return entry("scored", encode(Verdict(ticket, state, FORGED, {"accuracy": (0.0, 0.0)}, (3, 3))))


def group(forge: Forge) -> Callable[[InjectedRun], bytes]:
    """A forged group of train:2 before it is scored."""
    return lambda run: encode(forge(honest(run.ask(TRAIN))).group)


def placed(stream: str, data: bytes | Callable[[InjectedRun], bytes]) -> Injection:
    """A forged entry, to which the hash `open` is then changed to point as train:2's place."""

    def send(run: InjectedRun, by: Connection) -> None:
        where: Any = entry(stream, data)[1](run, by)
        by.execute("HSET", KEYS.open, TRAIN, f"{getattr(KEYS, stream)}|{where.decode()}|{V0}")

    return "issued", send


def taken(stream: str, stage: Stage = "issued") -> Injection:
    """All that lies on a stream, taken by a consumer that never answers."""
    group = ("GROUP", "workers", "thief", "COUNT", 9)
    return write("XREADGROUP", *group, "STREAMS", f"{{{stream}}}", ">", stage=stage)


def claimed(*options: Argument) -> Injection:
    """Train:2 claimed by a consumer that never answers."""
    return write("XCLAIM", "{tickets}", "workers", "thief", 0, "{entry}", *options)


def many(run: InjectedRun, by: Connection) -> None:
    """3,000 forged tickets in `open`."""
    place = run.known()["place"]
    flat = [part for number in range(1000, 4_000) for part in (f"train:{number}", place)]
    by.execute("HSET", KEYS.open, *flat)


def place_of(ticket: str | bytes, place: str | bytes = "{place}") -> Injection:
    """A place of a ticket in `open`: of train:2, unless another is given."""
    return write("HSET", "{open}", ticket, place)


def of_group(**changes: Any) -> Forge:
    """Change fields of the scored group."""
    return lambda made: replace(made, **changes)


# What is written

GOLD, PROMPT = (of_ticket(columns={"answer": "forged"}), of_ticket(prompt_ids=np.array([3], "<i4")))
OTHERS = of_ticket(id=OTHER)
LIKELY = of_rollouts(logprobs=np.zeros(3, "<f4"))
TOO_LONG: Forge = lambda made: make_group(made.group.ticket, tokens=(3,) * 9)  # noqa: E731
AHEAD = encode(Weights(Version(1, 9), "/tmp/forged", "ff" * 32, ""))
CLAIM = ("fence", "tickets", "eval_tickets", "rollouts")
ALONE = fcall("mark_alone", "fence tickets", "thief", "{entry}")

ANSWERS: dict[str, Injection] = {
    "another gold answer": scored(GOLD),
    "no columns": scored(of_ticket(columns={})),
    "another prompt": scored(PROMPT),
    "another contract": scored(of_ticket(contract="another")),
    "another temperature": scored(of_sampling(temperature=0.3)),
    "one completion more": scored(one_more),
    "another version of issue": scored(of_ticket(version=Version(1, 1))),
    "tokens of a version ahead": scored(spans(Version(1, 9))),
    "tokens of an incarnation ahead": scored(spans(Version(2, 0))),
    "tokens of other weights": scored(spans(V0, digest="ff" * 32)),
    "a completion over the length": scored(TOO_LONG),
    "a token out of the vocabulary": scored(of_rollouts(token_ids=np.array([3, 32, 3], "<i4"))),
    "rewards of other names": scored(of_group(rewards={"other": (1.0, 0.0)})),
    "the answer to another ticket": scored(OTHERS),
    "a verdict of another ticket": verdict("filtered", OTHER),
    "rewards of 1e100": altered(2, 1, "accuracy", value=[1e100, 0.0]),
    "rewards of infinity": altered(2, 1, "accuracy", value=[float("inf"), 0.0]),
    "a reward less": altered(2, 1, "accuracy", value=[1.0]),
    "log-probabilities above 0": altered(2, 0, 1, 0, 1, value=np.full(3, 0.5, "<f4").tobytes()),
    "log-probabilities of -1e30": altered(2, 0, 1, 0, 1, value=np.full(3, -1e30, "<f4").tobytes()),
    "log-probabilities of nan": altered(2, 0, 1, 0, 1, value=np.full(3, np.nan, "<f4").tobytes()),
    "nested 1,000,000 deep": entry("scored", NEST),
    "no message": entry("scored", b"\xc1nonsense"),
    "nothing": entry("scored", b""),
    "a ticket for an answer": entry("scored", lambda run: encode(run.ask(TRAIN))),
    "invented rewards": scored(of_group(rewards={"accuracy": (0.0, 1.0)})),
    "invented log-probabilities": scored(LIKELY),
    "a verdict that the group is filtered": verdict("filtered"),
    "a verdict that the ticket is dead": verdict("dead"),
    "a held-out answer under another contract": evaluated(of_ticket(contract="another")),
    "a held-out answer to another prompt": evaluated(PROMPT),
    "a held-out answer by another version": evaluated(spans(Version(1, 1))),
    "a held-out answer to another ticket": evaluated(of_ticket(id=TicketId.evaluation(V0, 0))),
    "a true answer, twice": all_of(*[entry("scored", lambda run: encode(honest(run.ask(TRAIN))))] * 2),
    "an answer to train:999": entry("scored", lambda run: encode(honest(run.ask(TRAIN))), UNKNOWN),
    "the answer to a ticket that was trained": (
        "trained", entry("scored", lambda run: forged(run.ask(TicketId.train(0)), GOLD), "train:0")[1]
    ),
    "a held-out answer on `scored`": entry("scored", b"x", EVAL),
    "an answer on `evaluated`": entry("evaluated", b"x"),
    "no field t": write("XADD", "{scored}", "*", "d", b"x"),
    "no field d": write("XADD", "{scored}", "*", "t", TRAIN),
    "no field t, and its counter at the largest number": all_of(
        write("HINCRBY", "{malformed}", "no field t, expected a ticket", 2**63 - 1),
        write("XADD", "{scored}", "*", "d", b"x"),
    ),
    "a t that is not UTF-8": write("XADD", "{scored}", "*", "t", b"\xff", "d", b"x"),
    "an id after which there is none, read twice": all_of(
        write("XADD", "{scored}", LARGEST, "t", UNKNOWN, "d", b"x"),
        *[("issued", lambda run, _: run.commit_log.read("train"))] * 2,
    ),
    "an id after which there is none on `evaluated`": write("XADD", "{evaluated}", LARGEST, "x", "y"),
    "`scored` emptied": write("XADD", "{scored}", "MAXLEN", 0, "*", "x", "y", stage="scored"),
}  # fmt: skip

WORK: dict[str, Injection] = {
    "a forged group on `rollouts`": entry("rollouts", group(GOLD)),
    "the same, as the place of train:2": placed("rollouts", group(GOLD)),
    "no message on `rollouts`, as the place of train:2": placed("rollouts", NEST),
    "no field t on `rollouts`": write("XADD", "{rollouts}", "*", "d", b"x"),
    "an `a` of words on `rollouts`": write("XADD", "{rollouts}", "*", "t", TRAIN, "d", b"x", "a", "x"),
    "an id after which there is none on `rollouts`": write("XADD", "{rollouts}", LARGEST, "x", "y"),
    "`rollouts` emptied": write("XADD", "{rollouts}", "MAXLEN", 0, "*", "x", "y", stage="generated"),
    "groups taken and kept": taken("rollouts", "generated"),
    "groups taken and acknowledged": all_of(
        taken("rollouts", "generated"), write("XACK", "{rollouts}", "workers", "{entry}")
    ),
    "a group claimed, `rollouts` moved past all ids": all_of(
        taken("rollouts", "generated"),
        write("XCLAIM", "{rollouts}", "workers", "thief", 0, "{entry}", "LASTID", LARGEST),
    ),
    "the group of another rewarder handed off forged": (
        "scoring", lambda run, by: fcall(
            "handoff", "fence open rollouts scored", "{entry}", TRAIN, forged(run.ask(TRAIN), GOLD)
        )[1](run, by),
    ),
    "a forged ticket": entry("tickets", lambda run: encode(run.ask(TRAIN)), UNKNOWN),
    "a ticket with another prompt, as the place of train:2": placed(
        "tickets", lambda run: encode(PROMPT(honest(run.ask(TRAIN))).group.ticket)
    ),
    "no message on `tickets`, as the place of train:2": placed("tickets", NEST),
    "no field d on `tickets`": write("XADD", "{tickets}", "*", "t", UNKNOWN),
    "an id after which there is none on `tickets`": write("XADD", "{tickets}", LARGEST, "x", "y"),
    "`tickets` emptied": write("XADD", "{tickets}", "MAXLEN", 0, "*", "x", "y"),
    "a ticket deleted": write("XDEL", "{tickets}", "{entry}"),
    "tickets taken and kept": taken("tickets"),
    "a ticket acknowledged": write("XACK", "{tickets}", "workers", "{entry}", stage="held"),
    "tickets taken over before their lease ends": fcall(
        "reclaim", "fence tickets", "thief", 0, 9, 2, "{server}", 9, stage="held"
    ),
    "a ticket claimed": write("XCLAIM", "{tickets}", "workers", "thief", 0, "{entry}", stage="held"),
    "a ticket claimed with 10^15 deliveries": all_of(
        taken("tickets"), claimed("RETRYCOUNT", 10**15)
    ),
    "a ticket claimed, the group moved past all ids": all_of(
        taken("tickets"), claimed("LASTID", LARGEST)
    ),
    "an id after which there is none on `dead`, and a ticket that dies": all_of(
        write("XADD", "{dead}", LARGEST, "x", "y"), placed("tickets", NEST)
    ),
    "tickets taken, their consumer deleted": all_of(
        taken("tickets"), write("XGROUP", "DELCONSUMER", "{tickets}", "workers", "thief")
    ),
    "the ticket of another actor handed off forged": (
        "held", lambda run, by: fcall(
            "handoff", "fence open tickets rollouts", "{entry}", TRAIN, group(GOLD)(run)
        )[1](run, by),
    ),
    "the ticket of another actor buried": fcall(
        "bury", "fence open tickets scored dead", "actor", "{entry}", TRAIN, b"x",
        encode(Verdict(TRAIN, "dead", FORGED)), FORGED, stage="held",
    ),
    "the ticket of another actor dropped": fcall(
        "drop", "fence tickets malformed", "no field t, expected a ticket", "{entry}", stage="held"
    ),
    "a ticket taken, marked as running alone, and lost": all_of(taken("tickets"), ALONE),
}  # fmt: skip

TABLES: dict[str, Injection] = {
    "`open`: another ticket at train:2's place": place_of("train:999"),
    "`open`: train:300000000": place_of("train:300000000"),
    "`open`: train:007": place_of("train:007"),
    "`open`: a name that is not UTF-8": place_of(b"\xff\xfe"),
    "`open`: 3,000 tickets": ("issued", many),
    "`open`: nonsense as train:2's place": place_of(TRAIN, b"nonsense"),
    "`open`: train:2 of version 1.300000000": place_of(TRAIN, "{tickets}|{entry}|1.300000000"),
    "`open`: train:2 of incarnation 9": place_of(TRAIN, "{tickets}|{entry}|9.0"),
    "an entry on `evaluated` as the place of train:2": placed("evaluated", NEST),
    "`open` as a stream": write("XADD", "{open}", "*", "x", "y", stage="claimed"),
    "`open` without train:2": write("HDEL", "{open}", TRAIN),
    "`tickets` as a hash": write("HSET", "{tickets}", "x", "y"),
    "`scored` as a string": write("SET", "{scored}", "x"),
    "state ended": write("SET", "{state}", "ended"),
    "another contract in `contract`": write("SET", "{contract}", b"x"),
    "weights of a version ahead in `weights`": write("SET", "{weights}", AHEAD),
    "no announced weights": write("DEL", "{weights}"),
    "`ledger`: 300000000 issued": write("HSET", "{ledger}", "issued", 300_000_000),
    "`fence`: another nonce": write("HSET", "{fence}", "nonce", "x"),
    "`fence`: a higher incarnation": write("HSET", "{fence}", "incarnation", 300_000_000),
    "`fence`: a lower incarnation": write("HSET", "{fence}", "incarnation", 0),
    "`fence`: nonsense as incarnation": write("HSET", "{fence}", "incarnation", "x"),
    "no fence": write("DEL", "{fence}"),
}

CALLS: dict[str, Injection] = {
    "a claim of a higher incarnation": fcall("claim", " ".join(CLAIM), "nonce", 9, "thief", 1),
    "a claim of a lower incarnation": fcall("claim", " ".join(CLAIM), "nonce", 0, "thief", 1),
    "a claim of another folder": fcall("claim", " ".join(CLAIM), "other", 9, "thief", 1),
    "a heartbeat that leaves": fcall("beat", "fence", 1, 0, "left"),
    "`restore` with another contract": fcall(
        "restore", "fence contract", 1, "nonce", "x", 86_400_000, 2, b"x"
    ),
    "`issue` of train:999": fcall("issue", "fence open ledger tickets", 1, UNKNOWN, "1.0", b"x"),
    "`close` of train:2 as trained": fcall(
        "close", "fence open ledger scored", 1, 0, 1, TRAIN, "trained"
    ),
    "`put` of other weights": fcall("put", "fence weights", 1, AHEAD),
    "`set_totals` of nonsense": fcall("set_totals", "fence ledger", 1, "issued", "x"),
    "a call with the keys of another run": write(
        "FCALL", "penstock_4_handoff", 4, "{fence}", "penstock:{{other}}:open", "{tickets}", "{scored}",
        "{entry}", TRAIN, b"x",
    ),
    "FUNCTION LOAD": write("FUNCTION", "LOAD", "REPLACE", "#!lua name=penstock_4\n"),
    "FUNCTION FLUSH": write("FUNCTION", "FLUSH"),
    "EVAL": write("EVAL", "return redis.call('DEL', KEYS[1])", 1, "{open}"),
    "CONFIG SET maxmemory-policy": write("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
    "FLUSHALL": write("FLUSHALL"),
    "ACL SETUSER": write("ACL", "SETUSER", "thief", "on", "nopass", "+@all", "~*"),
}  # fmt: skip

INJECTIONS = ANSWERS | WORK | TABLES | CALLS
