"""Joining a run, and following its contract when the learner publishes another one."""

import threading

from penstock.common.broker.work_stream import RunView, wait_for_contract
from penstock.common.errors import ContractMismatch, MalformedMessage
from penstock.common.log import get_logger
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import describe_difference, read_contract
from penstock.common.wire.messages import Group
from penstock.rewarders.pool import ScoringPool
from penstock.rewarders.scoring import Scorer, make_scorer

log = get_logger(__name__)


class CurrentScorer:
    """The scorer of the contract in force, for all threads."""

    def __init__(self, view: RunView, pool: ScoringPool, name: str) -> None:
        self._view = view
        self._pool = pool
        self._name = name
        self._changing = threading.Lock()
        self._scorer: Scorer | None = None

    def join(self, timeout_s: float, stopping: threading.Event) -> bool:
        """Wait for the run's contract; False if told to stop first.

        Raises DeadlineExceeded when no learner published one in time, ContractMismatch when this
        process cannot serve it.
        """
        data = wait_for_contract(self._view, timeout_s, stopping)
        if data is None:
            return False
        with self._changing:
            self._adopt(data)
        return True

    def for_group(self, group: Group) -> Scorer:
        """The scorer in force; a group of another contract makes this look for a new one.

        If there is none the group is an old one: what becomes of it is the learner's to say.
        """
        with self._changing:
            assert self._scorer is not None, "nothing is taken before joining"
            if group.ticket.contract != self._scorer.contract.hash:
                data = self._view.contract()
                if data is not None:
                    self._adopt(data)
            return self._scorer

    def _adopt(self, data: bytes) -> None:
        before = self._scorer
        if before is not None and data == encode(before.contract):
            return
        self._pool.start()
        try:
            self._scorer = make_scorer(read_contract(data), self._pool, self._name)
        except MalformedMessage as error:
            raise ContractMismatch(f"the contract cannot be read: {error}") from error
        if before is not None:
            changes = describe_difference(before.contract, self._scorer.contract)
            log.info("the contract changed", changes=changes)
