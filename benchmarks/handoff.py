"""What the ledger costs: hand-offs by the protocol's functions against plain stream commands.

    python -m benchmarks.handoff [--rounds 60] [--json]

benchmarks/README.md says which commands are compared and how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import GROUP, Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.work_stream import WorkStream
from penstock.common.guard import guard_children
from penstock.common.wire.ids import TicketId, Version
from penstock.learner.streams.learner_queue import LearnerQueue

GOAL = 2000
"""Groups of 66 KB that the ledger should hand off per second in batches of eight."""
GOAL_CELL = (66 * 1024, 8)
WAYS = ("plain", "ledger", "one by one")
RATIOS = (("ledger", "plain"), ("one by one", "plain"))
"""Pairs of ways whose rates are divided."""

_SENT = ("fcall", "xreadgroup")
"""Commands that the ways with the ledger send. Their other commands run inside of FCALL."""
_WAIT_S = 30.0
_LEASE_S = 30.0
_MAX_ATTEMPTS = 3
_ISSUE = 100
_ROUNDS_PER_SERVER = 6
"""By chance a server process is faster at one way than another process is: a cell has several."""


@dataclass(frozen=True, slots=True)
class Load:
    """The work: groups per timing by the size of their payload, and how many are taken at once."""

    groups: dict[int, int] = field(default_factory=lambda: {1024: 800, 66 * 1024: 240})
    batches: tuple[int, ...] = (1, 8)
    ticket_bytes: int = 256
    """Of a ticket, on the stream that groups replace it from."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """One way, once over all groups. Calls and time as the server counts them (INFO commandstats)."""

    groups_per_s: float
    calls_per_group: dict[str, float]
    server_us_per_group: dict[str, float]


Timings = dict[str, list[Timing]]
"""By way, in the order of the rounds."""


class Bench:
    """A run with tickets on its stream, and the ways to turn them into groups."""

    def __init__(self, url: str, run: str, groups: int, payload: bytes, ticket: bytes) -> None:
        # A deadline, as Connection has; redis-py does not know Penstock's option `owner`.
        self._client = redis.Redis.from_url(url.partition("?")[0], socket_timeout=_WAIT_S)
        self._connection = Connection(url, _WAIT_S, _WAIT_S)
        self._keys = Keys(run)
        self._queue = LearnerQueue(self._connection, self._keys, incarnation=1)
        self._groups = groups
        self._payload = payload
        self._ticket = ticket
        self._stream = WorkStream(
            self._connection, self._keys, self._keys.tickets, "actor", _LEASE_S, _MAX_ATTEMPTS
        )

    def time(self, way: str, batch: int) -> Timing:
        """Issue tickets, then take and hand off all; only the latter counts."""
        self._client.delete(*self._keys.all)
        self._queue.claim("nonce", "benchmark")
        (self._fill_plain if way == "plain" else self._fill)()
        steps: dict[str, Callable[[int], int]] = {
            "plain": self._plain,
            "ledger": self._ledger,
            "one by one": self._one_by_one,
        }
        step, done = steps[way], 0
        self._client.config_resetstat()
        start = time.perf_counter()
        while done < self._groups:
            done += step(min(batch, self._groups - done))
        took_s = time.perf_counter() - start
        timing = self._timing(took_s)
        self._check()
        return timing

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()
        self._connection.close()

    # The ways: each takes `count` tickets and hands their groups off

    def _plain(self, count: int) -> int:
        """XREADGROUP; then XADD, XACK and XDEL of each, in one pipeline of redis-py."""
        commands = self._take_plain(count)
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        pipeline.execute()
        return len(commands) // 3

    def _take_plain(self, count: int) -> list[tuple[Any, ...]]:
        source, destination = self._keys.tickets, self._keys.rollouts
        reply = self._client.execute_command(
            "XREADGROUP", "GROUP", GROUP, "actor", "COUNT", count, "STREAMS", source, ">"
        )
        streams: Any = reply.items() if isinstance(reply, dict) else reply
        commands: list[tuple[Any, ...]] = []
        for entry, fields in (entry for _, entries in streams for entry in entries):
            pair = (
                dict(zip(fields[::2], fields[1::2], strict=True)) if isinstance(fields, list) else fields
            )
            commands += [
                ("XADD", destination, "*", "t", pair[b"t"], "d", self._payload),
                ("XACK", source, GROUP, entry),
                ("XDEL", source, entry),
            ]
        return commands

    def _ledger(self, count: int) -> int:
        """`take`; then `handoff_all`."""
        entries = self._stream.take(count)
        finished = [(entry, self._payload) for entry in entries]
        return sum(self._stream.handoff_all(finished, self._keys.rollouts))

    def _one_by_one(self, count: int) -> int:
        """`take`; then a `handoff` of each, whose answer is waited for."""
        entries = self._stream.take(count)
        return sum(self._stream.handoff(entry, self._keys.rollouts, self._payload) for entry in entries)

    # Around them

    def _fill(self) -> None:
        version = Version(1, 0)
        tickets = [(TicketId.train(n), version, self._ticket) for n in range(self._groups)]
        for start in range(0, self._groups, _ISSUE):
            self._queue.issue("train", tickets[start : start + _ISSUE])

    def _fill_plain(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for number in range(self._groups):
            pipeline.execute_command(
                "XADD", self._keys.tickets, "*", "t", f"train:{number}", "d", self._ticket
            )
        pipeline.execute()

    def _check(self) -> None:
        left = self._client.xlen(self._keys.tickets)
        there = self._client.xlen(self._keys.rollouts)
        assert (left, there) == (0, self._groups), f"{left} tickets left, {there} groups"

    def _timing(self, took_s: float) -> Timing:
        statistics_of: Any = self._client.info("commandstats")
        calls, server_us = {}, {}
        for name, values in statistics_of.items():
            command = name.removeprefix("cmdstat_")
            if command not in ("config|resetstat", "info"):
                calls[command] = values["calls"] / self._groups
                server_us[command] = values["usec"] / self._groups
        return Timing(self._groups / took_s, calls, server_us)


def measure(load: Load, rounds: int) -> list[dict[str, Any]]:
    """A row per payload and batch; the ways take turns, each round begins with another."""
    chance = random.Random(load.seed)
    rows = []
    for size, groups in load.groups.items():
        payload, ticket = chance.randbytes(size), chance.randbytes(load.ticket_bytes)
        timings: dict[int, Timings] = {batch: {way: [] for way in WAYS} for batch in load.batches}
        for first in range(0, rounds, _ROUNDS_PER_SERVER):
            numbers = range(first, min(first + _ROUNDS_PER_SERVER, rounds))
            with _server() as url:
                bench = Bench(url, "handoff", groups, payload, ticket)
                for batch in load.batches:
                    _take_turns(bench, batch, numbers, timings[batch])
                bench.close()
        for batch in load.batches:
            rows.append({"payload": size, "batch": batch, "groups": groups} | _row(timings[batch]))
    return rows


def _take_turns(bench: Bench, batch: int, numbers: range, timings: Timings) -> None:
    for way in WAYS:
        bench.time(way, batch)  # the first time a server and a client allocate
    for number in numbers:
        first = number % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            timings[way].append(bench.time(way, batch))


def _row(timings: Timings) -> dict[str, Any]:
    rates = {way: [timing.groups_per_s for timing in found] for way, found in timings.items()}
    return {
        "groups_per_s": {way: _summary(found) for way, found in rates.items()},
        "ratio": {
            f"{way} / {base}": _summary(
                [one / other for one, other in zip(rates[way], rates[base], strict=True)]
            )
            for way, base in RATIOS
        },
        "server_us_per_group": {
            way: _mean(found, "server_us_per_group") for way, found in timings.items()
        },
        "calls_per_group": {way: _mean(found, "calls_per_group") for way, found in timings.items()},
    }


def _mean(timings: Sequence[Timing], name: str) -> dict[str, float]:
    commands = sorted({command for timing in timings for command in getattr(timing, name)})
    return {
        command: statistics.median(getattr(timing, name).get(command, 0.0) for timing in timings)
        for command in commands
    }


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextmanager
def _server() -> Iterator[str]:
    """The product's server (append-only file, synced every second); it does not rewrite its file."""
    with tempfile.TemporaryDirectory() as folder, LocalServer(Path(folder)) as server:
        client = redis.Redis.from_url(server.url.partition("?")[0])
        client.config_set("auto-aof-rewrite-percentage", 0)
        client.close()
        yield server.url


def table(rows: list[dict[str, Any]]) -> str:
    """The result as text."""
    titles = [f"{way} / {base}" for way, base in RATIOS]
    heads = "  ".join(f"{title:>25}" for title in titles)
    lines = [f"{'payload':>8} {'batch':>5}  {'plain groups/s':>14}  {'ledger groups/s':>15}  {heads}"]
    for row in rows:
        plain, ledger = (row["groups_per_s"][way]["median"] for way in ("plain", "ledger"))
        ratios = "  ".join(f"{_spread(row['ratio'][title]):>25}" for title in titles)
        lines.append(f"{_cell(row)}  {plain:>14,.0f}  {ledger:>15,.0f}  {ratios}")
    lines += ["", "server's time, us per group (within: commands that ran inside of fcall)"]
    lines += [f"{_cell(row)}  {way:16} {_costs(row, way)}" for row in rows for way in WAYS]
    for row in rows:
        if (row["payload"], row["batch"]) == GOAL_CELL:
            found = row["groups_per_s"]["ledger"]["median"]
            lines += ["", f"66 KB in batches of 8: {found:,.0f} groups/s by the ledger; goal {GOAL:,}"]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['payload'] / 1024:>6.0f}KB {row['batch']:>5}"


def _costs(row: dict[str, Any], way: str) -> str:
    costs = row["server_us_per_group"][way]
    names = _SENT if "fcall" in costs else tuple(costs)
    sent = {name: costs[name] for name in names}
    within = {name: cost for name, cost in costs.items() if name not in sent}
    parts = [f"{name} {cost:.1f}" for name, cost in sent.items()]
    if within:
        parts.append("within: " + " ".join(f"{name} {cost:.1f}" for name, cost in within.items()))
    return f"{sum(sent.values()):>6.1f}: {', '.join(parts)}"


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="timings of each way")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    guard_children()  # a killed benchmark leaves no server behind
    load = Load()
    rows = measure(load, options.rounds)
    if options.json:
        print(json.dumps({"load": asdict(load), "rounds": options.rounds, "cells": rows}, indent=1))
        print(table(rows), file=sys.stderr)
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
