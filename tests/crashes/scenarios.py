"""Troubles that a run must survive, by name; in them the mutation check takes rules out."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.common.failpoint import Armed
from tests.crashes.world import World

Scenario = Callable[[Path], World]
"""Makes the world in which it happens, in an empty folder."""


def calm(folder: Path) -> World:
    """Nothing happens."""
    return World(folder)


def dies_at(role: str, place: str, passage: int, **options: Any) -> Scenario:
    """A role dies once at a place; `options` are the learner's settings."""

    def make(folder: Path) -> World:
        return World(folder, {role: [Armed(place, passage, folder / "fired")]}, options=options)

    return make


def learner_dies_before_slow_actors(folder: Path) -> World:
    """The learner is back while much of what it issued is still being generated."""
    armed = Armed("updated", 3, folder / "fired")
    return World(folder, {"learner": [armed]}, options={"max_staleness": 8}, token_delay_s=0.1)


def poison_kills_the_actor(folder: Path) -> World:
    """Whoever generates the poison question dies of it, with others in flight.

    Three deaths cost as many leases, so there is more time than elsewhere.
    """
    return World(folder, misbehaviour="exit", limit_s=90.0)


def checkpoint_is_damaged(folder: Path) -> World:
    """A byte of the newest checkpoint flips; then the learner is killed."""

    def damage(world: World, step: int) -> None:
        if step == 3:
            newest = max((world.run_folder / "checkpoints").glob("[0-9]*"))
            for path in newest.glob("*/model.safetensors"):
                path.write_text("0" + path.read_text()[1:] + "0")
            os.kill(world.pids["learner"], signal.SIGKILL)

    return World(folder, on_step=damage, options={"max_steps": 10})


def server_is_rolled_back(folder: Path) -> World:
    """The server is killed and comes back with what it held two steps ago."""
    copy = folder / "queue then"

    def roll_back(world: World, step: int) -> None:
        queue = world.run_folder / "queue"
        if step == 2:
            shutil.copytree(queue, copy)
        if step == 4:
            world.server.kill()
            world.watch.forget()
            shutil.rmtree(queue / "appendonlydir")
            shutil.copytree(copy / "appendonlydir", queue / "appendonlydir")
            world.server.start()

    return World(folder, on_step=roll_back)


def another_client_deletes_the_tickets(folder: Path) -> World:
    """The stream of tickets is deleted, with its group and all that waited or was worked on.

    A fast actor may have worked on all of them already, so the stream is deleted in several steps.
    """

    def delete(world: World, step: int) -> None:
        if 2 <= step <= 5:
            world.watch.forget()
            world.watch.write("DEL", world.keys.tickets)

    return World(folder, on_step=delete)


def another_client_writes(folder: Path) -> World:
    """A write per step, each of which would stop a run that trusts what the server holds."""

    def write(world: World, step: int) -> None:
        keys, watch = world.keys, world.watch
        watch.write("SET", keys.state, "ended")  # each time: the learner may be quicker than the workers
        if step == 1:
            watch.write(
                "HSET", keys.open, "train:007", "nonsense", "train:1e3", f"{keys.tickets}|1-1|1.0"
            )
        if step == 2:
            watch.write("SET", keys.contract, "nonsense")
            watch.write("SET", keys.weights, "nonsense")
        if step == 3:
            watch.write("SET", keys.ledger, "a text where a hash belongs")
        if step == 4:
            watch.write("XGROUP", "DESTROY", keys.rollouts, "workers")
            watch.write("HSET", keys.fence, "nonce", "x", "holder", "x", "lease", "x")

    return World(folder, on_step=write)


def stopped_learner_goes_on(folder: Path) -> World:
    """A learner stops about to issue; another, whom its lock does not reach, takes over; it goes on."""

    armed = Armed("issue.before", 8, folder / "fired", signal.SIGSTOP)
    return World(folder, {"learner": [armed]}, options={"max_steps": 12})
