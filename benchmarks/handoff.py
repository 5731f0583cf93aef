"""What the ledger costs: hand-offs by the protocol's functions against plain stream commands.

    python -m benchmarks.handoff [--rounds 51] [--json]

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

from common.connection import Connection
from common.guard import guard_children
from common.keys import GROUP, Keys
from common.messages import Version
from common.protocol import WorkStream
from common.server import LocalServer
from learner.queue import LearnerQueue

GOAL = 0.8
"""The least share of the plain commands' rate that the functions are to reach."""
WAYS = ("plain", "ledger", "one by one")

_SENT = ("fcall", "xreadgroup")
"""What the ways with the ledger send; the other commands are called by the functions."""
_WAIT_S = 30.0
_LEASE_S = 30.0
_MAX_ATTEMPTS = 3
_ISSUE = 100


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


class Bench:
    """A run with tickets on its stream, and the three ways to turn them into groups."""

    def __init__(self, url: str, run: str, groups: int, payload: bytes, ticket: bytes) -> None:
        self._client = redis.Redis.from_url(url)
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
        """XREADGROUP; then XADD, XACK and XDEL of each, in one pipeline."""
        source, destination = self._keys.tickets, self._keys.rollouts
        reply = self._client.execute_command(
            "XREADGROUP", "GROUP", GROUP, "actor", "COUNT", count, "STREAMS", source, ">"
        )
        streams: Any = reply.items() if isinstance(reply, dict) else reply
        entries = [entry for _, entries in streams for entry in entries]
        pipeline = self._client.pipeline(transaction=False)
        for entry, fields in entries:
            pair = (
                dict(zip(fields[::2], fields[1::2], strict=True)) if isinstance(fields, list) else fields
            )
            pipeline.execute_command("XADD", destination, "*", "t", pair[b"t"], "d", self._payload)
            pipeline.execute_command("XACK", source, GROUP, entry)
            pipeline.execute_command("XDEL", source, entry)
        pipeline.execute()
        return len(entries)

    def _ledger(self, count: int) -> int:
        """`take`; then `handoff_all`: several in one transaction."""
        entries = self._stream.take(count)
        finished = [(entry, self._payload) for entry in entries]
        return sum(self._stream.handoff_all(finished, self._keys.rollouts))

    def _one_by_one(self, count: int) -> int:
        """`take`; then a `handoff` of each, whose answer is waited for."""
        entries = self._stream.take(count)
        return sum(self._stream.handoff(entry, self._keys.rollouts, self._payload) for entry in entries)

    # Around them

    def _fill(self) -> None:
        tickets = [(f"train:{number}", Version(1, 0), self._ticket) for number in range(self._groups)]
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
            if command not in ("config|resetstat", "info", "multi", "exec"):  # exec: the fcalls again
                calls[command] = values["calls"] / self._groups
                server_us[command] = values["usec"] / self._groups
        return Timing(self._groups / took_s, calls, server_us)


def measure(load: Load, rounds: int) -> list[dict[str, Any]]:
    """A row per payload and batch; the ways take turns, each round begins with another."""
    chance = random.Random(load.seed)
    rows = []
    for size, groups in load.groups.items():
        payload, ticket = chance.randbytes(size), chance.randbytes(load.ticket_bytes)
        with _server() as url:
            bench = Bench(url, "handoff", groups, payload, ticket)
            for batch in load.batches:
                for way in WAYS:
                    bench.time(way, batch)  # the first time a server and a client allocate
                timings = _take_turns(bench, batch, rounds)
                rows.append({"payload": size, "batch": batch, "groups": groups} | _row(timings))
            bench.close()
    return rows


def _take_turns(bench: Bench, batch: int, rounds: int) -> dict[str, list[Timing]]:
    timings: dict[str, list[Timing]] = {way: [] for way in WAYS}
    for number in range(rounds):
        first = number % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            timings[way].append(bench.time(way, batch))
    return timings


def _row(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    rates = {way: [timing.groups_per_s for timing in found] for way, found in timings.items()}
    return {
        "groups_per_s": {way: _summary(found) for way, found in rates.items()},
        "ratio": {
            way: _summary([one / plain for one, plain in zip(rates[way], rates["plain"], strict=True)])
            for way in WAYS[1:]
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
        client = redis.Redis.from_url(server.url)
        client.config_set("auto-aof-rewrite-percentage", 0)
        client.close()
        yield server.url


def table(rows: list[dict[str, Any]]) -> str:
    """The result for people."""
    titles = ("payload", "batch", "plain groups/s", "ledger / plain", "one by one / plain")
    lines = ["{:>8} {:>5}  {:>14}  {:>22}  {:>22}".format(*titles)]
    for row in rows:
        rate = row["groups_per_s"]["plain"]["median"]
        ratios = (f"{_spread(row['ratio'][way]):>22}" for way in WAYS[1:])
        lines.append(f"{_cell(row)}  {rate:>14,.0f}  {'  '.join(ratios)}")
    lines += ["", "server's time, us per group (within fcall: what the functions call)"]
    lines += [f"{_cell(row)}  {way:10} {_costs(row, way)}" for row in rows for way in WAYS]
    missed = sum(row["ratio"]["ledger"]["median"] < GOAL for row in rows)
    return "\n".join([*lines, "", f"ledger / plain below {GOAL:g} in {missed} of {len(rows)} cells"])


def _cell(row: dict[str, Any]) -> str:
    return f"{row['payload'] / 1024:>6.0f}KB {row['batch']:>5}"


def _costs(row: dict[str, Any], way: str) -> str:
    costs = row["server_us_per_group"][way]
    sent = {name: cost for name, cost in costs.items() if way == "plain" or name in _SENT}
    within = sum(costs.values()) - sum(sent.values())
    parts = ", ".join(f"{name} {cost:.1f}" for name, cost in sent.items())
    return f"{sum(sent.values()):>6.1f}: {parts}" + (f" (within {within:.1f})" if within else "")


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--rounds", type=int, default=51, help="timings of each way")
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
