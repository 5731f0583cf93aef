"""The start of the learner: the order in which it claims the run and builds its parts.

folder's lock -> queue server -> plan -> folder's claim -> contract -> policy -> learner/loop.py

A learner that finds another learner at one of these raises RunTaken, which names the other.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import RunView
from penstock.common.config.role_command import LearnerCommand
from penstock.common.config.settings import RunSettings
from penstock.common.config.variables import origins_of
from penstock.common.errors import ConfigError, RunTaken
from penstock.common.files.disk import Disk
from penstock.common.files.lock import hold_lock, holder_name, of_this_host
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Claim, read_chain
from penstock.common.phases import CLAIMING, LEAVING, READING_DATA, Phases
from penstock.common.role import connect
from penstock.common.transfer.object_store import is_store
from penstock.common.wire.codec import encode
from penstock.learner.data.plan import Plan, make_plan
from penstock.learner.lending import make_lender
from penstock.learner.loop import Learner
from penstock.learner.policy.collective import AllRanksPolicy, execute_calls
from penstock.learner.policy.deepspeed_engine import join_process_group
from penstock.learner.policy.policy import Policy
from penstock.learner.policy.processes import broadcast, end_with_launcher, rank
from penstock.learner.report.run_record import check_same_run, describe_start, write_start
from penstock.learner.state.checkpoint import (
    Checkpoint,
    check_loadable,
    newest_checkpoint,
    newest_position,
)
from penstock.learner.state.copies import check_not_older, check_release, may_run_elsewhere, name_of
from penstock.learner.state.deltas import Offer, with_deltas
from penstock.learner.state.file_server import serving
from penstock.learner.state.file_store import FileStore
from penstock.learner.state.incarnations import (
    claim_incarnation,
    describe_fence,
    next_incarnation,
    read_nonce,
)
from penstock.learner.state.queued_deltas import QueuedDeltas
from penstock.learner.streams.heartbeat import Heartbeat
from penstock.learner.streams.learner_queue import LearnerQueue


def run_learner(command: LearnerCommand, stopping: threading.Event) -> None:
    """Lock the run's folder, connect to the queue server and train, until the end or `stopping` is set.

    This is rank 0's part. Any other rank executes the policy's calls that rank 0 broadcasts, and raises
    DeadlineExceeded if it loses rank 0. A process whose launcher (torchrun) ends is killed. Raise
    RunTaken if another learner holds the run, ServerUnavailable or ConfigError if no usable server
    answers, ConfigError or DataError if settings or data cannot work; from the training also
    DeadlineExceeded, NoSignal, NotFinite and DiskFull.
    """
    end_with_launcher()
    if rank() > 0:
        join_process_group()
        make_policy = broadcast(None)
        execute_calls(make_policy())
        return
    with hold_lock(command.run.folder.learner_lock, "learner", leased=True) as before:
        connection = connect(command.redis_url, command.run, stopping)
        with closing(connection):
            _claim_and_train(command, connection, of_this_host(before), stopping)


def _claim_and_train(
    command: LearnerCommand, connection: Connection, gone: list[str], stopping: threading.Event
) -> None:
    """Claim the run on the queue server and in its folder, then train to the end or until `stopping`.

    `stopping`, when set, ends the training at the next wait, after a checkpoint. `gone` names learners
    of this host that have surely ended: their leases are not waited for. The contract is published over
    `connection`, and a heartbeat renews the lease. At the end, also after an error, the policy is closed
    and the lease ended (not after ServerUnavailable). Raise RunTaken, which describes the other learner,
    if another one holds the run. Raise ConfigError or DataError for wrong data, models, journals or
    settings, OSError for a file, ServerUnavailable, and what ends a training: DeadlineExceeded,
    NoSignal, NotFinite, DiskFull.
    """
    run = command.run
    nonce, keys = read_nonce(run.folder), Keys(run.name)
    queue = _claim(run, RunView(connection, keys), connection, nonce, gone)
    number, phases = queue.incarnation, Phases(trace=record_function)
    lender = make_lender(command, phases)
    folder = LearnerFolder(run.folder.path, number, Disk(run.disk_timeout_s, stopping, phases))
    with (
        _naming_the_successor(folder, number, RunView(connection, keys)),
        Heartbeat(queue, phases, run.lease_s, command.learner.stall_timeout_s),
        ExitStack() as stack,
    ):
        with phases.enter(READING_DATA):
            plan = make_plan(command.learner)
            queue.beat(run.lease_s, CLAIMING)  # refused if another took over meanwhile
            claim = claim_incarnation(folder, newest_position(folder))
            queue.own(name_of(folder), claim.holder)
            checkpoint = newest_checkpoint(folder, claim)
            start = _check_start(command, plan, folder, claim, checkpoint)  # before others learn of it
            folder.remove_asides()
            queue.set_state("running")  # an earlier learner of the run may have set "ended"
            offer = stack.enter_context(_offering(command, connection, folder, plan, phases, stopping))
            queued = QueuedDeltas(connection, keys, run.delta_mib << 20) if run.delta_mib else None
            queue.source = with_deltas(offer, command.learner.publish_deltas, plan.contract, queued)
            lender.take()  # before an actor of this host starts its engine there
            queue.publish_contract(encode(plan.contract))  # actors start their engines meanwhile
        with phases.enter("loading the model"):
            policy = _make_policy(command, plan, checkpoint, phases)
            if start:
                given = [f"LEARNER_{name.upper()}" for name in command.learner.model_fields_set]
                write_start(folder, start, origins_of(given, command.env_file))
        with _closing(policy, folder), phases.enter("working"):
            Learner(
                command, plan, folder, claim, policy, checkpoint, queue, nonce, stopping, phases, lender
            ).train()


def _claim(
    run: RunSettings, view: RunView, connection: Connection, nonce: str, gone: list[str]
) -> LearnerQueue:
    """Claim the run on the queue server, as the next incarnation, and return its calls.

    `gone` names learners that have surely ended, unless this folder is a copy. Raise RunTaken if another
    learner holds the run, ConfigError if the folder is an older copy, OtherRelease for open tickets of
    another release, or another error of Connection.call.
    """
    check_release(view)
    elsewhere = may_run_elsewhere(run.folder, view)
    check_not_older(run.folder, view)  # a claim would end the right learner, which may be stopped
    queue = LearnerQueue(connection, view.keys, next_incarnation(run.folder, view.incarnation()))
    queue.claim(nonce, holder_name(), run.lease_s, () if elsewhere else gone)
    try:
        check_not_older(run.folder, view)  # the run may have gone on elsewhere during the wait
    except ConfigError:
        queue.beat(0.0, LEAVING)  # the learner of the other folder can start at once
        raise
    return queue


def _check_start(
    command: LearnerCommand, plan: Plan, folder: RunFolder, claim: Claim, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    """Return what this start is made of, after a look at the run's last start.

    One that only evaluates leaves what the last start was made of: return {} then. Raise ConfigError if
    the run is another one, or its journal damaged, DataError or OSError for data that cannot be read.
    """
    if command.learner.evaluate_only:
        return {} if folder.record.is_file() else describe_start(command.learner, plan)
    evaluated = folder.evaluations.is_file() and folder.evaluations.stat().st_size > 0
    begun = bool(checkpoint or evaluated) or any(
        record["kind"] == "batch" for _, record in read_chain(folder, claim)
    )
    start = describe_start(command.learner, plan)
    check_same_run(folder, start, command.learner, begun)
    return start


def _offering(
    command: LearnerCommand, connection: Connection, folder: LearnerFolder, plan: Plan, phases: Phases,
    stopping: threading.Event,
) -> AbstractContextManager[Offer | None]:  # fmt: skip
    """Return a context that yields where other hosts get the run's files, by LEARNER_FILES_ADDRESS.

    Raise ConfigError for an address that cannot be used, StoreFailed if a store takes no file.
    """
    settings, contract = command.learner, plan.contract
    if not is_store(settings.files_address):
        return serving(settings, connection.server, folder.versions, contract)
    if settings.files_url:
        raise ConfigError(
            "LEARNER_FILES_URL is set, but LEARNER_FILES_ADDRESS names an object store, and that is "
            "announced: leave LEARNER_FILES_URL out"
        )
    names = [one.name for one in contract.model_files]
    url, limit_s = settings.files_address.rstrip("/"), command.run.server_timeout_s
    store = f"{url}/{command.run.name}"
    return nullcontext(FileStore(store, Path(contract.model), names, limit_s, stopping, phases.poll))


@contextmanager
def _closing(policy: AllRanksPolicy, folder: LearnerFolder) -> Iterator[None]:
    """Close the policy at the block's end, also after an error.

    Raise RunTaken for an OSError of the block if a later learner has claimed the folder: that one clears
    away what was half written.
    """
    try:
        yield
    except OSError:
        folder.check_not_superseded()
        raise
    finally:
        policy.close()


@contextmanager
def _naming_the_successor(folder: LearnerFolder, number: int, view: RunView) -> Iterator[None]:
    """Raise the block's RunTaken again, with a sentence about the learner that took the run over.

    `number` is this learner's incarnation. The sentence tells whether the folder has a claim of the
    incarnation that the queue server states through `view`. Other errors pass through. Raise
    ConfigError if a claim's file is damaged, ServerUnavailable if the server does not answer.
    """
    try:
        yield
    except RunTaken as error:
        successor = describe_fence(folder, number, view.incarnation())
        remedy = "One learner at a time holds a run: stop the other one before you start this one again"
        raise RunTaken(f"{error}; {successor}. {remedy}") from error


def _make_policy(
    command: LearnerCommand, plan: Plan, checkpoint: Checkpoint | None, phases: Phases
) -> AllRanksPolicy:
    """Build the policy on all ranks, and return rank 0's, which calls all ranks and tells `phases`.

    The policy starts with the initial weights, or with the weights of a checkpoint that has no optimizer
    state. The learner loads any other checkpoint later. `checkpoint` None: the run has none. Raise
    ConfigError if settings, model, machine and checkpoint do not fit.
    """
    if checkpoint:
        check_loadable(checkpoint, command.learner)
    bare = checkpoint.bare_weights if checkpoint else None
    join_process_group()
    make_policy = broadcast(partial(Policy, plan.model_folder, command.learner, plan.steps, bare))
    policy = make_policy()
    policy.phases = phases
    return AllRanksPolicy(policy, phases)
