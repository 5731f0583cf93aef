"""The scorer of a run's contract, replaced when the learner publishes another contract."""

import threading

from penstock.common.broker.run_view import RunView, wait_for_contract
from penstock.common.errors import ContractMismatch, MalformedMessage
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.contract import Contract, describe_difference
from penstock.common.wire.messages import Group
from penstock.rewarders.scoring import Scorer, make_scorer
from penstock.rewarders.scoring_pool import ScoringPool

log = get_logger(__name__)


class CurrentScorer:
    """The scorer of the contract in force, shared by all threads.

    Raise ContractMismatch if this process cannot serve the contract.
    """

    def __init__(self, view: RunView, pool: ScoringPool, name: str, contract: bytes) -> None:
        self._view = view
        self._pool = pool
        self._name = name
        self._changing = threading.Lock()
        self._scorer = self._make(contract)

    def for_group(self, group: Group) -> Scorer:
        """Return the scorer in force; for a group of another contract, read the contract again first.

        If the contract is still the same, the group is an old one: the learner decides what becomes of
        its outcome. Raise ContractMismatch if this process cannot serve the new contract.
        """
        with self._changing:
            if group.ticket.contract != self._scorer.contract.hash:
                self._adopt(self._view.contract())
            return self._scorer

    def rejoin(self, timeout_s: float, stopping: threading.Event) -> None:
        """Wait until a learner has published a contract, and adopt it. Return early on `stopping`.

        Raise DeadlineExceeded if none was published in time, ContractMismatch as `for_group` does.
        """
        data = wait_for_contract(self._view, timeout_s, stopping)
        with self._changing:
            self._adopt(data)

    def _adopt(self, data: bytes | None) -> None:
        """Change to an encoded contract unless it is None or in force; raise ContractMismatch."""
        before = self._scorer.contract
        if data is not None and data != encode(before):
            self._scorer = self._make(data)
            log.info("The contract changed.", changes=describe_difference(before, self._scorer.contract))

    def _make(self, data: bytes) -> Scorer:
        """Return a scorer of an encoded contract; raise ContractMismatch."""
        try:
            return make_scorer(decode(data, Contract), self._pool, self._name)
        except MalformedMessage as error:
            raise ContractMismatch(f"the contract cannot be read: {error}") from error
