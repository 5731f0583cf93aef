"""The actor: join the run, start the engine, turn tickets into groups.

Waits for: the learner's contract, up to RUN_JOIN_TIMEOUT_S, then for the TicketWorker to end.
Unblocked by: a learner that publishes a contract; the run's end; an emptied queue server.
Produces: groups of sampled completions on `rollouts`, through the TicketWorker.
Ends when: the run has ended, a signal came, or the engine failed.

The engine starts before any weights are announced, because both take long. When the queue server was
emptied, the actor keeps its engine and waits for the run's contract again.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.actors.agents.endpoint import Endpoint
from penstock.actors.device_user import DeviceUser
from penstock.actors.engine import Engine
from penstock.actors.rollout_groups import Agents, Completions, Conversations
from penstock.actors.ticket_worker import TicketWorker, check_same
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import (
    RunView,
    wait_for_another_contract,
    wait_for_contract,
    wait_for_run,
)
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings
from penstock.common.episodes.pool import EpisodePool
from penstock.common.errors import ConfigError, ContractMismatch, RunNotReady
from penstock.common.log import get_logger
from penstock.common.monitor.learner_watch import LearnerWatch
from penstock.common.role import connect, consumer_name
from penstock.common.sandbox.limits import allow_open_files
from penstock.common.shared_device import SharedDevice
from penstock.common.transfer.model_folder import FetchStopped, ModelFetcher, check_base
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import Contract, check_tokenizer

_REJOIN_S = 0.5
_CONNECTIONS, _FEWEST_CONNECTIONS = 8, 64
"""Connections of agents to the endpoint: per live rollout, and at least."""
_OPEN_FILES, _OTHER_OPEN_FILES = 8, 512
"""Files that an episode has open, without connections to the endpoint, and that all else has."""

log = get_logger(__name__)

MakeEngine = Callable[[ActorSettings, Contract, Path], Engine]
"""Starts an engine on a model folder; raises EngineFailed."""


def run(settings: ActorCommand, stopping: threading.Event, make_engine: MakeEngine) -> None:
    """Join the run, start an engine by `make_engine`, and turn tickets into groups until the run ends.

    Return too when `stopping` is set. Wait up to RUN_JOIN_TIMEOUT_S for a learner, also for one that
    goes on with a run that has ended. After an emptied queue server join again with the same engine. At
    the end stop the engine and close the connection, also after an error. Raise DeadlineExceeded if no
    learner comes or its heartbeat stops, RunNotReady if the learner publishes another contract,
    MalformedMessage if its contract cannot be read, ConfigError, ServerUnavailable, EngineFailed.
    """
    with contextlib.suppress(FetchStopped):
        asyncio.run(_run(settings, stopping, make_engine))


async def _run(settings: ActorCommand, stopping: threading.Event, make_engine: MakeEngine) -> None:
    """Join the run, start an engine by `make_engine`, and turn tickets into groups until the run ends.

    Return too when `stopping` is set, also while waiting up to RUN_JOIN_TIMEOUT_S for a contract. After
    a RunNotReady, which is logged, wait 0.5 s and for the contract, then go on with the same engine. At
    last stop the engine, and close the episodes and the connection, also after an error. Raise
    DeadlineExceeded if no learner comes, RunNotReady if the new contract is another one, and the other
    errors of the worker.
    """
    connection = await asyncio.to_thread(connect, settings.redis_url, settings.run, stopping)
    view = RunView(connection, Keys(settings.run.name))
    waiting = (view, settings.run.join_timeout_s, stopping)
    joined = await asyncio.to_thread(_join, settings, view, stopping)
    if joined is None:
        return
    contract, model = joined
    _allow_open_files(contract, settings.actor.episode_workers)
    watch = LearnerWatch(connection, view.keys, settings.run)
    device = _device_of(settings, contract)
    if device and not await asyncio.to_thread(_take, device, stopping, watch):
        return
    engine = _start_engine(settings, contract, model, make_engine)
    actor = settings.actor
    user = DeviceUser(engine, device, actor.sleep_level, actor.start_timeout_s)
    groups = await _make_groups(settings, contract, model, engine)
    consumer = consumer_name("actor")
    log.info(f"{consumer} joined run {settings.run.name}.")
    try:
        while not stopping.is_set():
            try:
                return await TicketWorker(
                    settings, contract, engine, groups, user,
                    connection=connection, consumer=consumer, stopping=stopping,
                ).run()  # fmt: skip
            except RunNotReady as error:
                log.warning("Joining the run again.", cause=str(error))
            await user.leave()  # a learner may need the device before it sets the run up again
            await asyncio.sleep(_REJOIN_S)  # what is wrong may stay: a key of another type
            await asyncio.to_thread(watch.check)
            data = await asyncio.to_thread(wait_for_contract, *waiting)
            if data is not None:
                check_same(contract, data)
    finally:
        await groups.close()
        await engine.stop()
        connection.close()
        log.info(f"{consumer} left run {settings.run.name}.")


def _join(
    settings: ActorCommand, view: RunView, stopping: threading.Event
) -> tuple[Contract, Path] | None:
    """Return the run's contract and the folder of its model on this host; None if there is no run.

    An earlier learner may have left a contract that cannot be served here: wait for the next one's.
    Raise ContractMismatch if none comes, and the errors of `wait_for_run` and `_find_model`.
    """
    data = wait_for_run(view, settings.run.join_timeout_s, stopping)
    while data is not None:
        contract = decode(data, Contract)
        try:
            return contract, _find_model(settings, contract, view, stopping)
        except ContractMismatch as error:
            log.warning("This contract cannot be served; waiting for the next.", cause=str(error))
            data = wait_for_another_contract(view, data, settings.run.join_timeout_s, stopping)
            if data is None and not stopping.is_set():
                raise
    return None


def _device_of(settings: ActorCommand, contract: Contract) -> SharedDevice | None:
    """Return the device that the learner of this host uses by turns with actors; None without one.

    Raise ConfigError if the folder of its locks, or a file, cannot be made, or if the engine would lose
    weights that no version brings back.
    """
    if not contract.share_device:
        return None
    if contract.adapter and settings.actor.sleep_level == 2:
        raise ConfigError(
            "ACTOR_SLEEP_LEVEL=2 drops the model's weights, and versions bring LoRA adapters alone: set "
            "it to 1, or LEARNER_LORA_PUBLISH_MERGED=true"
        )
    return SharedDevice(settings.run.folder.device_locks, alone=False)


def _take(device: SharedDevice, stopping: threading.Event, watch: LearnerWatch) -> bool:
    """Wait until the learner leaves the device to the actors; return False if `stopping` is set before.

    Raise DeadlineExceeded if the learner's heartbeat stops, and the other errors of its watch.
    """

    def give_up() -> bool:
        """Return whether the actor is to stop. Raise what the watch of the learner raises."""
        watch.check()
        return stopping.is_set()

    log.info("Waiting until the learner leaves the device that they share.")
    return device.take(give_up)


def _find_model(
    settings: ActorCommand, contract: Contract, view: RunView, stopping: threading.Event
) -> Path:
    """Return the folder of the run's model: with ACTOR_WEIGHTS_FROM=folder the one in the contract.

    Else it may be a copy. Its files are checked, so that config and stop tokens are the run's. Raise
    FetchStopped if told to stop, and the other errors of ModelFetcher.with_weights and `check_base`.
    """
    if settings.actor.weights_from == "folder":
        return check_base(contract, check_tokenizer(contract))
    fetcher = ModelFetcher(view, settings.run, stopping, settings.actor.weights_from)
    return check_base(contract, fetcher.with_weights(contract, settings.actor.trust_remote_code))


def _start_engine(
    settings: ActorCommand, contract: Contract, model: Path, make_engine: MakeEngine
) -> Engine:
    """Return an engine started by `make_engine` on the model folder `model`; block until it is ready.

    The begin and the time it took are logged. Raise EngineFailed if the engine does not start.
    """
    log.info(f"Starting the inference engine on {model}.")
    began = time.monotonic()
    engine = make_engine(settings.actor, contract, model)
    log.info(f"The inference engine is ready after {time.monotonic() - began:.1f} s.")
    return engine


def _allow_open_files(contract: Contract, workers: int) -> None:
    """Let this process open the files of as many episodes as there are `workers`.

    Raise ConfigError if the machine does not allow so many files.
    """
    each = _OPEN_FILES + (_CONNECTIONS if contract.episodes.agent else 0)
    if contract.episodes.active:
        allow_open_files(_OTHER_OPEN_FILES + each * workers, "ACTOR_EPISODE_WORKERS")


async def _make_groups(
    settings: ActorCommand, contract: Contract, model: Path, engine: Engine
) -> Completions:
    """Return what samples rollouts: Agents, Conversations (for tools or environments) or Completions.

    The first two run at most `settings.actor.episode_workers` episodes at a time; none is started here.
    For Agents the endpoint is started, and its address is logged. Raise ConfigError if the user of the
    episodes' processes does not exist, OSError if the endpoint finds no port.
    """
    if not contract.episodes.active:
        return Completions(engine, model)
    workers = settings.actor.episode_workers
    pool = await asyncio.to_thread(EpisodePool, settings.actor, contract.episodes)
    given = (engine, contract, model, pool, workers)
    if contract.episodes.agent is None:
        return Conversations(*given)
    endpoint = Endpoint(max(_FEWEST_CONNECTIONS, _CONNECTIONS * workers))
    await endpoint.start()
    log.info(f"Agents call the model at {endpoint.url}.")
    return Agents(*given, endpoint)
