"""Held-out questions, asked through the same actors and rewarders, never trained on.

Eval tickets pin the version they score: actors answer them with exactly that version. The evaluation
runs while the next batch's groups are generated, and is done before that batch is written down.
"""

from dataclasses import dataclass

from penstock.common.broker.work_stream import BEGINNING
from penstock.common.errors import MalformedMessage
from penstock.common.wire.codec import decode_outcome, encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import ANSWER, ScoredGroup, Verdict
from penstock.learner.data.tickets import TicketSource
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.learner_queue import LearnerQueue

_READ = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one held-out question: K completions, `answers` what the rewarder found in each.

    There is none when its ticket died; `reason` says why. `failures` says per completion why it could
    not be scored, "" if it was; it is empty if all were.
    """

    index: int
    completions: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    rewards: tuple[dict[str, float | None], ...] = ()
    lengths: tuple[int, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    reason: str = ""
    failures: tuple[str, ...] = ()

    def scored(self) -> list[int]:
        """Indices of the completions that could be scored."""
        failures = self.failures or ("",) * len(self.completions)
        return [index for index, failure in enumerate(failures) if not failure]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """All answers of a version, in the questions' order."""

    version: Version
    answers: tuple[Answer, ...]


class Evaluator:
    """Runs at most one evaluation at a time."""

    def __init__(self, commit_log: CommitLog, queue: LearnerQueue, source: TicketSource) -> None:
        self._commit_log = commit_log
        self._queue = queue
        self._source = source
        self._version: Version | None = None
        self._answers: dict[int, Answer] = {}
        self._position = BEGINNING

    @property
    def running(self) -> bool:
        """Whether answers are still to come."""
        return self._version is not None

    def start(self, version: Version) -> None:
        """Ask all held-out questions of the announced version."""
        self._version, self._answers = version, {}
        for index in range(len(self._source.eval_questions)):
            self._commit_log.ledger.opened(TicketId.evaluation(version, index), version)
        # Written down first: after a crash the resumed learner knows which tickets to withdraw.
        self._commit_log.record(
            "evaluation", version=str(version), questions=len(self._source.eval_questions)
        )
        self.issue_missing()

    def issue_missing(self) -> None:
        """Put the questions still to be answered on their stream, unless they are on their way."""
        self._position = BEGINNING
        if self._version is None:
            return
        tickets = [
            self._source.evaluation(self._version, index)
            for index in range(len(self._source.eval_questions))
            if index not in self._answers
        ]
        self._queue.issue("eval", [(ticket.id, ticket.version, encode(ticket)) for ticket in tickets])

    def poll(self) -> tuple[bool, Evaluated | None]:
        """Take what came back: whether anything did, and the result once it is whole."""
        if self._version is None:
            return False, None
        entries = self._queue.outcomes("eval", self._position, _READ)
        for entry in entries:
            self._position = entry.id
            self._commit_log.saw(entry)
            if entry.ticket in self._commit_log.ledger.open:
                self._take(entry.ticket, entry.payload)
        if len(self._answers) < len(self._source.eval_questions):
            return bool(entries), None
        return True, self._finish(self._version)

    def _take(self, ticket: TicketId, payload: bytes) -> None:
        index = ticket.number
        try:
            outcome = decode_outcome(payload)
        except MalformedMessage as error:
            outcome = Verdict(ticket, "dead", f"malformed outcome: {error}")
        if isinstance(outcome, ScoredGroup) and not self._is_pinned(outcome):
            outcome = Verdict(ticket, "dead", f"not sampled by version {self._version} alone")
        if isinstance(outcome, Verdict):
            self._answers[index] = Answer(index, reason=outcome.reason)
            self._commit_log.ledger.close(ticket, "dead", outcome.reason)
            return
        rollouts = outcome.group.rollouts
        self._answers[index] = Answer(
            index,
            outcome.texts,
            tuple(map(str, outcome.extra.get(ANSWER, outcome.texts))),
            tuple(
                {name: values[place] for name, values in outcome.rewards.items()}
                for place in range(len(rollouts))
            ),
            tuple(len(rollout.token_ids) for rollout in rollouts),
            tuple(rollout.finish_reason for rollout in rollouts),
            failures=outcome.failures,
        )
        self._commit_log.ledger.close(ticket, "evaluated", str(self._version))

    def _is_pinned(self, outcome: ScoredGroup) -> bool:
        """Whether every token was sampled by the version that is being evaluated."""
        spans = [span for rollout in outcome.group.rollouts for span in rollout.spans]
        return all(span.version == self._version for span in spans)

    def _finish(self, version: Version) -> Evaluated:
        answers = tuple(self._answers[index] for index in sorted(self._answers))
        self._version = None
        self._commit_log.record(
            "evaluated",
            version=str(version),
            results=[
                [answer.index, list(answer.completions), list(answer.rewards)] for answer in answers
            ],
        )
        return Evaluated(version, answers)
