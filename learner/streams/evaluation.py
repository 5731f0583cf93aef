"""Evaluation of a version on the held-out questions, by the same actors and rewarders.

Eval tickets pin a version: actors answer them with exactly those weights. The evaluation runs while
the groups of the next batch are generated, and ends before the journal records that batch.
"""

import time
from dataclasses import dataclass, replace

from blake3 import blake3

from penstock.common.errors import MalformedMessage, ValueTooLarge
from penstock.common.log import get_logger
from penstock.common.wire.codec import decode, decode_outcome, encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import ANSWER, EndState, Verdict
from penstock.learner.data.tickets import TicketSource
from penstock.learner.state.ledger import RecordedAnswer
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.learner_queue import LearnerQueue
from penstock.learner.streams.refusal import MEANING, OutcomeCheck

log = get_logger(__name__)

_RECORDED_TOGETHER = 64
_RECORDED_EVERY_S = 5.0  # answers may take minutes each


@dataclass(frozen=True, slots=True)
class Answer:
    """The K completions of one held-out question, and the answer that the rewarder found in each.

    There are no completions when the ticket died or was refused, for `reason`. `failures` has the reason
    why each completion was not scored, "" for a scored one; it is empty if all were scored.
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
        """Return the indices of the completions that were scored, in order; [] if there are none."""
        failures = self.failures or ("",) * len(self.completions)
        return [index for index, failure in enumerate(failures) if not failure]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """All answers of a version, in the order of the questions."""

    version: Version
    answers: tuple[Answer, ...]


class Evaluator:
    """Asks the held-out questions of one version at a time, and collects the answers.

    `source` has the questions and makes the tickets, `queue` issues them, `commit_log` reads their
    outcomes and records what came of them, and `check` refuses answers to other tickets than were asked.
    Creating an Evaluator asks nothing: `start` does.
    """

    def __init__(
        self, commit_log: CommitLog, queue: LearnerQueue, source: TicketSource, check: OutcomeCheck
    ) -> None:
        self._commit_log = commit_log
        self._queue = queue
        self._source = source
        self._check = check
        self._version: Version | None = None
        self._answers: dict[int, Answer] = {}
        self._count = len(source.eval_questions)
        self._ended: list[Evaluated] = []
        self._recorded_at = time.monotonic()

    @property
    def running(self) -> bool:
        """Whether an evaluation waits for answers."""
        return self._version is not None

    def start(self, version: Version) -> None:
        """Begin the evaluation of `version`: open, record and issue a ticket per held-out question.

        Questions that an earlier start of the learner asked the same weights, and whose answers are in
        the journal, are not asked again. Each ticket is opened in the ledger, recorded in the journal,
        then added to the server. Do not wait for the answers. No other evaluation may be running: its
        answers would be forgotten. Raise DiskFull, DataError if a ticket is too large, RunTaken,
        ServerUnavailable or another error of Connection.call.
        """
        self._version = version
        self._answers = self._earlier_answers(self._commit_log.ledger.versions.get(version, ""))
        asked = [index for index in range(self._count) if index not in self._answers]
        for index in asked:
            self._commit_log.ledger.opened(TicketId.evaluation(version, index), version)
        # Recorded before the tickets are issued: a resumed learner knows which tickets to withdraw.
        counts = {"questions": self._count, "asked": asked}
        self._commit_log.record("evaluation", version=str(version), **counts)
        self.issue_missing()

    def _earlier_answers(self, weights: str) -> dict[int, Answer]:
        """Return by question the answers in the journal to what is asked now, of weights with this hash.

        Raise MalformedMessage for damage.
        """
        earlier = {
            one["asked"]: one["answer"]
            for one in self._commit_log.ledger.earlier_answers
            if one["weights"] == weights
        }
        asked = {self._asked(index): index for index in range(self._count)} if earlier else {}
        found = {asked[one]: decode(data, Answer) for one, data in earlier.items() if one in asked}
        if found:
            log.info(
                f"{len(found)} of {self._count} held-out questions were answered before the restart."
            )
        return {index: replace(answer, index=index) for index, answer in found.items()}

    def _asked(self, index: int) -> str:
        """Return the hash of what a held-out question asks, which is the same for all versions."""
        return blake3(encode(self._source.evaluation(Version(0, 0), index))).hexdigest()

    def issue_missing(self) -> None:
        """Issue the tickets of the running evaluation's questions that have no answer yet.

        Without a running evaluation do nothing. A ticket that is on the server already is not added
        again. Raise DataError if a ticket is too large for the server, RunTaken, ServerUnavailable or
        another error of Connection.call.
        """
        if self._version is None:
            return
        missing = [index for index in range(self._count) if index not in self._answers]
        tickets = [self._source.evaluation(self._version, index) for index in missing]
        try:
            self._queue.issue(
                "eval", [(ticket.id, ticket.version, encode(ticket)) for ticket in tickets]
            )
        except ValueTooLarge as error:
            raise self._source.too_large(tickets, self._commit_log.ledger.position, error) from error

    def poll(self) -> bool:
        """Take the outcomes of eval tickets that are there; return whether one of this evaluation ended.

        Do not wait: return False without a running evaluation. Take 64 outcomes at most. Answers are
        recorded in the journal, 64 and more together or after 5 s: a restarted learner has them. The end
        of the last ticket ends the evaluation and records its result in the journal, for `take_ended`.
        Raise DiskFull, RunTaken, ServerUnavailable or another error of Connection.call.
        """
        if self._version is None:
            return False
        before = len(self._answers)
        for entry in self._commit_log.read("eval"):
            if entry.ticket in self._commit_log.ledger.open:
                self._take(entry.ticket, entry.payload)
        came = len(self._answers) > before
        waiting = len(self._commit_log.ledger.answers)
        late = time.monotonic() >= self._recorded_at + _RECORDED_EVERY_S
        if waiting >= _RECORDED_TOGETHER or (waiting and late):
            self._commit_log.record("answers", version=str(self._version))
            self._recorded_at = time.monotonic()
        if len(self._answers) == self._count:
            self._finish(self._version)
        return came

    def keep(self) -> None:
        """Record the answers of a running evaluation once more, after a checkpoint.

        A resume reads what the journal has after the checkpoint. Raise DiskFull, RunTaken,
        ServerUnavailable or another error of Connection.call.
        """
        if self._version is not None and self._answers:
            self._commit_log.ledger.answers = [self._to_record(one) for one in self._answers.values()]
            self._commit_log.record("answers", version=str(self._version))

    def take_ended(self) -> list[Evaluated]:
        """Return the evaluations that ended since the last call, oldest first, or []. Forget them."""
        ended, self._ended = self._ended, []
        return ended

    def _take(self, ticket: TicketId, payload: bytes) -> None:
        """Store the answer in `payload`, the outcome of an open ticket, and end the ticket.

        In the ledger it ends as evaluated for a scored group, stale for a refused outcome, dead for a
        verdict or malformed bytes. The last three leave the question unanswered: asking again could go
        on without end.
        """
        index = ticket.number
        try:
            outcome = decode_outcome(payload)
        except MalformedMessage as error:
            self._end_unanswered(ticket, "dead", f"malformed outcome: {error}")
            return
        refused = self._check.why_refused(ticket, outcome)
        if refused:
            self._end_unanswered(ticket, "stale", f"refused: {MEANING[refused]}")
            return
        if isinstance(outcome, Verdict):
            self._end_unanswered(ticket, "dead", outcome.reason)
            return
        rollouts, rewards = outcome.group.rollouts, outcome.rewards.items()
        answer = Answer(
            index,
            outcome.texts,
            tuple(map(str, outcome.extra.get(ANSWER, outcome.texts))),
            tuple({name: values[place] for name, values in rewards} for place in range(len(rollouts))),
            tuple(rollout.length for rollout in rollouts),
            tuple(rollout.finish_reason for rollout in rollouts),
            failures=outcome.failures,
        )
        self._end(ticket, answer, "evaluated", str(self._version))

    def _end_unanswered(self, ticket: TicketId, state: EndState, reason: str) -> None:
        """End an open ticket as `state` in the ledger; its question has no completions, for `reason`.

        Raise KeyError if the ticket is not open.
        """
        self._end(ticket, Answer(ticket.number, reason=reason), state, reason)

    def _end(self, ticket: TicketId, answer: Answer, state: EndState, reason: str) -> None:
        """End an open ticket as `state` in the ledger, with the `answer` to its question.

        The answer is for the journal too. Raise KeyError if the ticket is not open.
        """
        ledger = self._commit_log.ledger
        self._answers[answer.index] = answer
        ledger.close(ticket, state, reason)
        ledger.answers.append(self._to_record(answer))

    def _to_record(self, answer: Answer) -> RecordedAnswer:
        """Return an answer of the running evaluation as the journal has it."""
        versions = self._commit_log.ledger.versions
        weights = versions.get(self._version, "") if self._version else ""
        return {"asked": self._asked(answer.index), "weights": weights, "answer": encode(answer)}

    def _finish(self, version: Version) -> None:
        """Write the answers of the evaluation of `version`, which are all there, to the journal.

        No evaluation runs then, and `take_ended` returns this one. Raise DiskFull, RunTaken,
        ServerUnavailable or another error of Connection.call.
        """
        answers = tuple(self._answers[index] for index in sorted(self._answers))
        results = [[answer.index, list(answer.completions), list(answer.rewards)] for answer in answers]
        self._version = None
        self._commit_log.record("evaluated", version=str(version), results=results)
        self._ended.append(Evaluated(version, answers))
