"""The actor: join the run, start the engine, turn tickets into groups.

    contract = join(...)            waits for the learner, with a deadline
    engine.start(model folder)      before any weights are announced: both take long
    worker.run()                     tickets -> rollouts, until the run ends

When the queue server was emptied the actor keeps its engine and waits for the run's contract again.
"""

import asyncio
import threading
import time
from collections.abc import Callable

from penstock.actors.engine import Engine
from penstock.actors.join import check_same, join
from penstock.actors.ticket_worker import TicketWorker
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import RunView
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings
from penstock.common.errors import RunNotReady
from penstock.common.log import get_logger
from penstock.common.role import connect, consumer_name
from penstock.common.wire.contract import Contract, check_tokenizer

log = get_logger(__name__)

MakeEngine = Callable[[ActorSettings, Contract], Engine]


def run(settings: ActorCommand, stopping: threading.Event, make_engine: MakeEngine) -> None:
    """Be an actor until the run ends or `stopping` is set."""
    asyncio.run(_run(settings, stopping, make_engine))


async def _run(settings: ActorCommand, stopping: threading.Event, make_engine: MakeEngine) -> None:
    connection = await asyncio.to_thread(connect, settings.redis_url, settings.run, stopping)
    view = RunView(connection, Keys(settings.run.name))
    consumer = consumer_name("actor")
    contract = await join(view, settings.run.join_timeout_s, stopping)
    if contract is None:
        return
    engine = make_engine(settings.actor, contract)
    began = time.monotonic()
    try:
        await engine.start(check_tokenizer(contract))
        started_s = round(time.monotonic() - began, 1)
        log.info("actor is ready", run=settings.run.name, consumer=consumer, started_s=started_s)
        while not stopping.is_set():
            try:
                return await TicketWorker(
                    settings, contract, engine,
                    connection=connection, consumer=consumer, stopping=stopping,
                ).run()  # fmt: skip
            except RunNotReady as error:
                log.warning("joining the run again", cause=str(error))
            again = await join(view, settings.run.join_timeout_s, stopping)
            if again is not None:
                check_same(contract, again)
    finally:
        await engine.stop()
        connection.close()
        log.info("left the run", run=settings.run.name)
