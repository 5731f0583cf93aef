"""The real consumers of every message, behind its decoder, with files instead of a queue server.

Each function returns in a word what became of the message, or raises: PenstockError where the product
refuses, `Wrong` where it accepts what it must not. Any other exception is the product's fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from penstock.actors.engine import verify_weights
from penstock.actors.held_tickets import HeldTickets, Job
from penstock.actors.partial_groups import join, read_partial, rest_of, write_partial
from penstock.actors.ticket_worker import check_same
from penstock.actors.weights.source import find_weights
from penstock.common.broker.work_stream import Entry
from penstock.common.errors import MalformedMessage, PenstockError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import LearnerFolder
from penstock.common.journal.claims import Position
from penstock.common.journal.segments import encode_record, read_journal
from penstock.common.wire.codec import decode, decode_outcome, encode, pack, unpack
from penstock.common.wire.contract import Contract, describe_difference
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import Group, ScoredGroup, Ticket, Verdict, Weights
from penstock.deploy.samples import answers_as_lines, as_lines, read_rows, select
from penstock.learner.algorithm.batch import build_batch
from penstock.learner.report.completions import completion_rows
from penstock.learner.report.eval_metrics import summarise
from penstock.learner.report.metrics import group_metrics
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import encode_groups
from penstock.learner.state.ledger import Ledger
from penstock.learner.state.versions import write_version
from penstock.learner.streams.commit import CommitLog
from penstock.learner.streams.evaluation import Evaluator
from penstock.learner.streams.intake import Arrivals, Intake
from penstock.learner.streams.refusal import OutcomeCheck
from penstock.rewarders.scoring import Scorer, make_scorer
from tests.common.builders import weights_hash
from tests.crashes.policy import HashPolicy
from tests.fuzz.expected import (
    LONGEST_REASON,
    LOSSES,
    Wrong,
    check_group,
    check_json,
    check_loss,
    check_numbers,
    check_text,
    require,
)
from tests.fuzz.valid import (
    EVAL,
    ISSUED_AT,
    MODEL,
    NEWEST,
    STEP,
    TRAIN,
    VOCABULARY,
    WEIGHTS,
    Issued,
    Sample,
    scored,
)
from tests.learner.builders import make_group

PUBLISHED = {version: weights_hash(version) for version in (ISSUED_AT, NEWEST)}
_MOST_BUILT = 64
OUTSIDE = "outside"
"""A folder of weights that nobody published."""


class FileJournal:
    """Writes a record to a file of its own and reads it back, as the next learner would."""

    incarnation = 1

    def __init__(self, folder: LearnerFolder) -> None:
        self._folder = folder
        folder.journal.mkdir(parents=True, exist_ok=True)

    def append(self, kind: str, **fields: Any) -> Position:
        """Store one record in place of the last one; raise Wrong if it does not come back equal."""
        record = {"kind": kind, **fields}
        self._folder.segment(1, 0).write_bytes(encode_record(record))
        found = [one for _, one in read_journal(self._folder, 1)]
        require(
            len(found) == 1 and pack(found[0]) == pack(record), f"a record {kind!r} is not read back"
        )
        return Position(1, 0)


@dataclass
class OneAnswer:
    """In place of the queue server: gives the same answer to every ticket that is asked."""

    data: bytes
    asked: int = 0
    given: int = 0
    closed: dict[str, str] = field(default_factory=dict)

    def issue(self, _purpose: str, tickets: list[Any]) -> list[Any]:
        """Take tickets."""
        self.asked += len(tickets)
        return [version for _, version, _ in tickets]

    def outcomes(self, *_: object) -> list[Entry]:
        """Return an answer while there is a ticket without one."""
        if self.given >= self.asked:
            return []
        self.given += 1
        return [Entry(f"{self.given}-1", EVAL, self.data)]

    def close(self, _purpose: str, ends: dict[str, str], _entries: object = ()) -> int:
        """Note how tickets ended."""
        self.closed |= ends
        return len(ends)


class LocalPool:
    """In place of the scoring processes: the arguments must be able to travel, the scores are given."""

    def check(self, _spec: object) -> str:
        """Every reward can be used."""
        return ""

    def score(self, spec: Any, arguments: dict[str, list[Any]]) -> SimpleNamespace:
        """Return alternating scores."""
        size = len(arguments["completions"])
        require(
            all(len(values) == size for values in arguments.values()), "arguments of several lengths"
        )
        require(pack(unpack(pack(arguments))) == pack(arguments), "arguments that cannot travel")
        return SimpleNamespace(values=[float(place % 2) for place in range(size)], extra={}, metrics={})


class Consumers:
    """All consumers of a run. `folder` is for files that the learner would write."""

    def __init__(self, issued: Issued, folder: Path) -> None:
        self.issued = issued
        self.folder = LearnerFolder(folder / "run", 1)
        self._journal = FileJournal(self.folder)
        self._hash = write_version(self.folder, HashPolicy(), NEWEST, "").hash
        (self.folder.path / OUTSIDE).mkdir()
        (self.folder.path / OUTSIDE / "model.safetensors").write_text("others")
        self._recorder = Recorder(self.folder, [], "x")
        self._pool: Any = LocalPool()
        tokenizer = Tokenizer.from_file(str(issued.model / "tokenizer.json"))
        self._scorer = Scorer(issued.contract, tokenizer, self._pool, "rewarder-1")
        self._whole = scored(issued.train)
        self._losses = [issued.settings.model_copy(update=changes) for changes in LOSSES]

    def take(self, sample: Sample, data: bytes) -> str:
        """Hand the bytes that became of a valid message to its consumer."""
        self.folder.metrics.unlink(missing_ok=True)
        self.folder.evaluations.unlink(missing_ok=True)
        self.folder.completion_table(STEP + 1).unlink(missing_ok=True)
        return {
            "intake": self.intake, "evaluation": self.evaluation, "weights": self.weights,
            "contract": self.contract, "partial": self.partial,
            "rewarder": lambda data: self.rewarder(data, sample.message.ticket.id),
            "actor": lambda data: self.actor(data, sample.message.id),
        }[sample.consumer](data)  # fmt: skip

    # The learner

    def intake(self, data: bytes) -> str:
        """Fold an outcome, and train what is held. Raise Wrong for any error of the product."""
        try:
            return self._intake(data)
        except PenstockError as error:
            raise Wrong(f"the learner ends with {type(error).__name__}: {error}") from error

    def evaluation(self, data: bytes) -> str:
        """Answer a held-out question with an outcome. Raise Wrong for any error of the product."""
        try:
            return self._evaluation(data)
        except PenstockError as error:
            raise Wrong(f"the learner ends with {type(error).__name__}: {error}") from error

    def _intake(self, data: bytes) -> str:
        """Return how an outcome's ticket ended: trained, dead, stale or filtered."""
        ledger = Ledger()
        ledger.next_number = TRAIN.number + 1
        ledger.opened(TRAIN, ISSUED_AT)
        ledger.versions = {**PUBLISHED}
        intake = Intake(ledger, self.issued.source, VOCABULARY)
        intake.fold(Entry("1-1", TRAIN, data))
        if TRAIN in intake.held:
            check_group(intake.held[TRAIN], self.issued.train, PUBLISHED)
            groups = intake.form(STEP)
            arrivals = intake.take_arrivals()
            if groups:
                return self._trained(groups, arrivals)
        else:
            require(TRAIN not in ledger.open, "the ticket is neither held nor ended")
            arrivals = intake.take_arrivals()
        state, reason = ledger.take_unrecorded()[TRAIN]
        require(state in ("dead", "stale", "filtered"), f"it ended as {state}")
        check_text(reason, LONGEST_REASON)
        counted = len(arrivals.filtered) + arrivals.dead + arrivals.stale
        require(counted == 1, f"it counts {counted} times")
        require(
            state != "stale" or arrivals.dropped or arrivals.refused, "it is stale for no counted reason"
        )
        if arrivals.filtered:
            self._check_verdict(arrivals.filtered[0])
        if arrivals.filtered or arrivals.dropped:
            self._trained([self._whole], arrivals)
        return state

    def _check_verdict(self, verdict: Verdict) -> None:
        require(verdict.ticket_id == TRAIN, f"a verdict about {verdict.ticket_id!r:.60}")
        require(set(verdict.rewards) in (set(), set(WEIGHTS)), f"rewards {list(verdict.rewards)}")
        sizes = {len(values) for values in verdict.rewards.values()}
        require(
            not sizes or sizes == {self.issued.settings.num_generations}, f"{sizes} values per reward"
        )
        fits = not (sizes and verdict.lengths) or {len(verdict.lengths)} == sizes
        require(fits, f"{len(verdict.lengths)} lengths for {sizes} values")
        check_numbers("lengths", [*verdict.lengths], 2**31)
        require(min(verdict.lengths, default=1) > 0, f"lengths {verdict.lengths}")

    def _trained(self, groups: list[ScoredGroup], arrivals: Arrivals) -> str:
        """Journal, train and record a batch as the learner's loop does."""
        metrics = group_metrics(groups, arrivals, WEIGHTS)
        check_json("a metric", metrics)
        encoded = encode_groups(groups)
        self._journal.append(
            "batch", step=STEP + 1, groups=encoded, filtered=[encode(one) for one in arrivals.filtered],
            metrics=metrics,
        )  # fmt: skip
        again = [decode(data, ScoredGroup) for data in encoded]
        require(encode_groups(again) == encoded, "a journalled group changes when it is read")
        for settings in self._losses:
            batch = build_batch(groups, WEIGHTS, STEP, settings)
            check_loss(batch, settings)
        rows = completion_rows(STEP + 1, groups, arrivals.filtered, batch, WEIGHTS)
        self._recorder.completions(STEP + 1, lambda: rows)
        require(self.folder.completion_table(STEP + 1).is_file(), "no table could be made")
        self._recorder.metrics(STEP + 1, metrics)
        self._recorder.cut_after(STEP + 1)
        shown = read_rows(self.folder.path, STEP + 1)
        require(len(shown) == len(rows), f"{len(shown)} of {len(rows)} rows are shown")
        check_json("the table of completions", shown)
        for name in ("best", "no_spread", "truncated", "failed", ""):
            "\n".join(as_lines(row, 80) for row in select(shown, name))
        return "trained"

    def _evaluation(self, data: bytes) -> str:
        """Return how the one held-out question's ticket ended: evaluated, dead or stale."""
        queue: Any = OneAnswer(data)
        journal: Any = self._journal
        ledger, source = Ledger(), self.issued.source
        ledger.versions = {**PUBLISHED}
        check = OutcomeCheck(ledger, source, VOCABULARY)
        evaluator = Evaluator(CommitLog(ledger, journal, queue), queue, source, check)
        evaluator.start(NEWEST)
        for _ in range(20):
            if evaluator.running:
                evaluator.poll()
        require(not evaluator.running, f"no end of the evaluation after {queue.given} answers")
        (result,) = evaluator.take_ended()
        (answer,) = result.answers
        metrics = summarise(result.answers, "accuracy")
        check_json("a metric of the evaluation", metrics)
        self._recorder.results("eval", {"step": STEP, **metrics})
        self._recorder.evaluation(result, [self.issued.eval.columns], metrics)
        require(self._recorder.evaluated_steps() == {STEP}, "the evaluation is not found again")
        (row,) = read_json_lines(self.folder.evaluations)
        check_json("the answers", row)
        answers_as_lines(row, 80)
        if queue.closed[EVAL] != "evaluated":
            check_text(answer.reason, LONGEST_REASON)
            require(answer.reason and not answer.completions, "no reason, or completions")
            return queue.closed[EVAL]
        check_group(decode_outcome(data), self.issued.eval, PUBLISHED)
        return "evaluated"

    # The workers

    def rewarder(self, data: bytes, ticket: TicketId) -> str:
        """Score a group as the rewarder's loop does, and hand its outcome to the learner."""
        group = decode(data, Group)
        if group.ticket.id != ticket:
            raise MalformedMessage(f"the entry of {ticket} holds {group.ticket.id}")
        outcome = encode(self._scorer.score_group(group))
        return self.intake(outcome) if ticket.purpose == "train" else self.evaluation(outcome)

    def actor(self, data: bytes, ticket: TicketId) -> str:
        """Hold a ticket, answer it, and hand the scored group to the learner."""
        found = decode(data, Ticket)
        held, stream = HeldTickets(4), SimpleNamespace()
        held.add(Job(stream, Entry("1-1", ticket, data), found, False))  # type: ignore[arg-type]
        held.startable(NEWEST, True)
        held.places(found.purpose, 100, NEWEST)
        if found.num_generations > _MOST_BUILT:
            return "held"
        size = found.num_generations
        made = make_group(found, spans=[(NEWEST.step, 4)], rewards=(0.0,) * size)
        made = ScoredGroup(
            made.group, {name: tuple(map(float, range(size))) for name in WEIGHTS}, ("x",) * size, "r"
        )
        return self.intake(encode(made)) if ticket.purpose == "train" else self.evaluation(encode(made))

    def partial(self, data: bytes) -> str:
        """Continue what another actor gave back with the training ticket, and hand the group on."""
        asked = self.issued.train
        begun = read_partial(data, asked, episodes=False)
        rests = [rest_of(asked, index, one) for index, one in enumerate(begun)]
        made = make_group(asked, spans=[(NEWEST.step, 1)], rewards=(0.5,) * len(begun))
        (rest, *_) = made.group.rollouts
        rollouts = [
            one if one and one.finish_reason != "cut" else join(one, rest, ("a",), str) for one in begun
        ]
        require(all(sampling.max_tokens > 0 for _, sampling in rests), "no token left to sample")
        group = replace(made.group, rollouts=tuple(rollouts))
        write_partial(asked, tuple(rollouts), "actor-2")
        values = {name: (0.5,) * len(begun) for name in WEIGHTS}
        return self.intake(encode(ScoredGroup(group, values, ("x",) * len(begun), "r")))

    def weights(self, data: bytes) -> str:
        """Take announced weights as an actor does, up to the engine."""
        found = decode(data, Weights)
        folder = verify_weights(find_weights(found, self.folder))
        right = self.folder.version(NEWEST.incarnation, NEWEST.step)
        require(folder == right, f"weights are taken from {folder}")
        require(
            found.version == NEWEST and found.hash == self._hash, "other weights than the published ones"
        )
        return "taken"

    def contract(self, data: bytes) -> str:
        """Adopt a contract as rewarder and actor do."""
        found = decode(data, Contract)
        describe_difference(self.issued.contract, found)
        HeldTickets(found.credit)
        check_same(found, data)
        local = replace(found, model=str(self.issued.model)) if found.model == MODEL else found
        make_scorer(local, self._pool, "rewarder-1")
        return "adopted"
