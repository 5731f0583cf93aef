"""The intake: from the stream of outcomes to the groups of a batch.

    fold(entry)   ends the ticket of a verdict or a refused group; holds a group that can be trained
    form(step)    drops groups over max_staleness, takes groups_per_step others in order of arrival

The result depends only on the order of the stream and on the step, so a resumed learner decides the
same. With at_max_staleness "pace" a batch takes a group only if the pace allows it
(learner/streams/pace.py), so that hardly any group is dropped; with drop or requeue the first ones.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.common.broker.work_stream import Entry
from penstock.common.errors import MalformedMessage, NoSignal
from penstock.common.wire.codec import decode_outcome
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import UNSCORED, Outcome, ScoredGroup, Verdict
from penstock.learner.algorithm.batch import is_over_lag
from penstock.learner.data.tickets import TicketSource
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.pace import choose_in_pace, keeps_pace
from penstock.learner.streams.refusal import MEANING, OutcomeCheck, Reason


@dataclass(slots=True)
class Arrivals:
    """Outcomes since the last batch, for the metrics."""

    filtered: list[Verdict] = field(default_factory=list)
    dead: int = 0
    stale: int = 0
    foreign: int = 0  # of these stale, refused answers to an earlier incarnation's tickets
    refused: Counter[Reason] = field(default_factory=Counter)  # of train and eval tickets
    dropped: list[ScoredGroup] = field(default_factory=list)  # of these stale, over max_staleness
    total_dropped: int = 0  # over the whole run
    last_dead: str = ""  # a ticket and the reason why it died

    @property
    def without_signal(self) -> int:
        """Number of tickets since the last batch with nothing to train on: filtered, dead or refused.

        Groups over max_staleness are not counted: they had signal. Nor are refused answers to tickets of
        an earlier incarnation: a start with other settings changes what is asked, so they say nothing
        about the questions.
        """
        return len(self.filtered) + self.dead + self.stale - self.foreign - len(self.dropped)


class Intake:
    """Holds the groups that may be trained, by ticket, and decides which of them form a batch.

    Ends of tickets go to `ledger`. `source` has the settings and makes tickets again for the check of a
    group; `vocab_size` is above all token ids of the model.
    """

    def __init__(self, ledger: Ledger, source: TicketSource, vocab_size: int) -> None:
        self._arrivals = Arrivals()
        self.newest_version: Version | None = None
        self._ledger = ledger
        self._source = source
        self._settings = source.settings
        self.check = OutcomeCheck(ledger, source, vocab_size)
        self.held: dict[TicketId, ScoredGroup] = {}
        self._decoded: dict[str, Outcome] = {}  # by the entry's id
        self._in_time: tuple[int, set[TicketId]] = (-1, set())  # a step, and what was in time for it

    def decode_ahead(self, entry: Entry) -> bool:
        """Decode an outcome that `fold` gets later, which is most of the work. Nothing else changes.

        Return whether it is the verdict of an open ticket that waits for an outcome, so that `fold` will
        end that ticket, if no earlier entry does. Malformed bytes are left to `fold`.
        """
        with suppress(MalformedMessage):
            self._decoded[entry.id] = decode_outcome(entry.payload)
        waits = entry.ticket in self._ledger.open and entry.ticket not in self.held
        is_verdict = isinstance(self._decoded.get(entry.id), Verdict)
        return waits and is_verdict and entry.ticket.purpose == "train"

    def fold(self, entry: Entry) -> bool:
        """Take an outcome: hold its group for a batch, or end its ticket in the ledger.

        Return False, without any change, if the entry's ticket is not open or its group is held; else
        True. A group that is no answer to the ticket as issued is refused, and the ticket ends stale:
        once it is in the journal, a group that cannot be trained would end every resume. A verdict's
        ticket ends filtered or dead, as the verdict says, that of malformed bytes dead. Ends are
        counted. A held group may raise `newest_version`. Raise DataError or ConfigError if a streamed
        data set is unusable.
        """
        decoded = self._decoded.pop(entry.id, None)
        if entry.ticket not in self._ledger.open or entry.ticket in self.held:
            return False
        try:
            outcome = decoded or decode_outcome(entry.payload)
        except MalformedMessage as error:
            self._end_dead(entry.ticket, f"malformed outcome: {error}")
            return True
        reason = self.check.why_refused(entry.ticket, outcome)
        if reason:
            self._refuse(entry.ticket, reason)
        elif isinstance(outcome, ScoredGroup):
            self._hold(entry.ticket, outcome)
        elif outcome.state == "filtered":
            self._ledger.close(entry.ticket, "filtered", outcome.reason)
            fits = self._fits(outcome)  # else of an older contract
            self._arrivals.filtered.append(outcome if fits else replace(outcome, rewards={}, lengths=()))
        else:
            self._end_dead(entry.ticket, outcome.reason)
        return True

    def _hold(self, ticket: TicketId, scored: ScoredGroup) -> None:
        """Hold `scored` as the group of `ticket`, until a batch takes it.

        `newest_version` becomes the newest version, by step, that sampled one of its tokens, if that is
        newer.
        """
        self.held[ticket] = scored
        made = [one for rollout in scored.group.rollouts for one in rollout.sequences]
        versions = [span.version for one in made for span in one.spans]
        known = [self.newest_version] if self.newest_version else []
        newest = max(versions + known, key=lambda one: (one.step, one.incarnation), default=None)
        self.newest_version = newest  # None: a forged group has no sampled token

    def _refuse(self, ticket: TicketId, reason: Reason) -> None:
        """End the open ticket of a refused outcome as stale, for `reason`, and count it.

        Also count it as foreign if an earlier incarnation of the learner issued the ticket. Raise
        KeyError if the ticket is not open.
        """
        self._arrivals.foreign += self._ledger.is_of_earlier_incarnation(ticket)
        self._arrivals.stale += 1
        self._ledger.close(ticket, "stale", f"refused: {MEANING[reason]}")

    def _fits(self, verdict: Verdict) -> bool:
        """Return whether a verdict has the contract's rewards and a possible length for each completion.

        There is one value of each reward, and one length, for each of num_generations completions. A
        length is at most max_completion_length times most_sequences, which is 1 without an agent.
        """
        size = self._settings.num_generations
        return (
            set(verdict.rewards) == set(self._settings.reward_names)
            and all(len(values) == size for values in verdict.rewards.values())
            and len(verdict.lengths) == size
            and max(verdict.lengths)
            <= self._settings.max_completion_length * self._settings.most_sequences
        )

    def form(self, step: int) -> list[ScoredGroup] | None:
        """Remove and return the held groups of the next batch, or None while the batch waits for more.

        `step` is the number of Updates made. Held groups over max_staleness are dropped first. A batch
        has groups_per_step groups, in order of arrival. It has fewer if enough tickets came back without
        signal (see `_spent`), and all open tickets still come in time for later batches (see `_choose`).
        The caller ends the tickets of what is returned. Raise NoSignal if a batch with fewer would have
        none.
        """
        self._drop_over_lag(step)
        size = self._settings.groups_per_step
        chosen, may_be_smaller = self._choose(step, size)
        if len(chosen) < size and not (self._spent(len(chosen)) and may_be_smaller):
            return None
        if not chosen:
            raise self._no_signal(step + 1)
        return [self.held.pop(ticket) for ticket in chosen]

    def _no_signal(self, step: int) -> NoSignal:
        """Return the error that no group since the last batch can be trained in step `step`."""
        found = self._arrivals
        refused = "".join(f", {MEANING[why]}: {count}" for why, count in self.check.refused.items())
        begin, end = "", f". The last that died is {found.last_dead}" if found.dead else ""
        why = "the questions are too easy, too hard, or the rewards do not fit. See `penstock samples`, "
        why += "`queues audit`, then change data or rewards"
        unscored = [one for one in found.filtered if UNSCORED in one.reason]
        if unscored:
            last = f"{unscored[-1].ticket_id}: {unscored[-1].reason}"
            begin = f"rewards fail in {len(unscored)} of these groups, such as {last}. "
        if 2 * found.dead > found.without_signal:  # the cause comes first: it is not the questions
            begin, end = f"{found.last_dead}. Like this ticket, most died; ", ""
            why = "correct what failed; `penstock samples --failed` and `queues dead` show it"
        return NoSignal(
            f"{begin}step {step}: {found.without_signal} groups in a row had nothing to learn from "
            f"({len(found.filtered)} without spread in their rewards, {found.dead} dead, "
            f"{found.stale} stale{refused}): {why}{end}",
            found.filtered,
        )

    def take_arrivals(self) -> Arrivals:
        """Return the counts of outcomes since the last call, and begin them at 0 again.

        `total_dropped` is set to the run's, and `refused` to the refusals by reason, which also begin
        again. So does the count of tickets without signal, by which `form` takes a smaller batch.
        """
        arrivals, self._arrivals = self._arrivals, Arrivals()
        arrivals.total_dropped = self._ledger.total_dropped
        arrivals.refused = self.check.take_refused()
        return arrivals

    def _spent(self, usable: int) -> bool:
        """Return whether so many tickets came back without signal that a smaller batch is taken.

        A round is groups_per_step tickets. Counted are the tickets without signal (`without_signal`),
        and the `usable` groups, those that can be trained now. They must fill 1 + max_resample_times
        rounds; with `usable` 0 max_empty_updates times as many. Example: 2 groups per step,
        max_resample_times 1, 1 usable group: spent when 3 others had no signal.
        """
        rounds = 1 + self._settings.max_resample_times
        if not usable:
            rounds *= self._settings.max_empty_updates
        return self._arrivals.without_signal + usable >= rounds * self._settings.groups_per_step

    def _drop_over_lag(self, step: int) -> None:
        """Drop the held groups that are over max_staleness after `step` Updates.

        Their tickets end as stale. The groups are counted and stored in the arrivals. With
        at_max_staleness "requeue" their questions are asked again. Each group is looked at once per
        step, because a wait polls often.
        """
        known = self._in_time[1] if self._in_time[0] == step else set()
        for ticket, scored in list(self.held.items()):
            if ticket not in known and is_over_lag(scored, step, self._settings):
                self._arrivals.dropped.append(self.held.pop(ticket))
                self._arrivals.stale += 1
                self._ledger.drop(ticket, ask_again=self._settings.at_max_staleness == "requeue")
        self._in_time = (step, set(self.held))

    def _choose(self, step: int, size: int) -> tuple[list[TicketId], bool]:
        """Return held tickets for a batch, `size` at most, and whether a smaller batch may be taken.

        The batch follows `step` Updates. The tickets are the first to arrive, or with at_max_staleness
        "pace" the first that the pace allows (`choose_in_pace`). Only with "pace" a smaller batch may be
        forbidden: if the other open tickets would come too late, as more than k x `size` are due within
        the k batches after this one, for a k below max_staleness. Tickets of this step are not in that
        count: new ones are issued as long as there is no batch, without end.
        """
        if self._settings.at_max_staleness != "pace":
            return list(self.held)[:size], True
        train = (ticket for ticket in self._ledger.open if ticket.purpose == "train")
        due = Counter(self._due_within(ticket, step) for ticket in train)
        held = {ticket: self._due_within(ticket, step) for ticket in self.held}
        return choose_in_pace(held, due, size), keeps_pace(due, self._settings.max_staleness, size)

    def _due_within(self, ticket: TicketId, step: int) -> int:
        """Return how many batches after the one that follows `step` Updates may train the open ticket.

        This is at least 0. Example: issued at step 3 with max_staleness 2: 2 at step 3, 0 at step 5.
        Raise KeyError if the ticket is not open.
        """
        return max(0, self._ledger.open[ticket].step + self._settings.max_staleness - step)

    def _end_dead(self, ticket: TicketId, reason: str) -> None:
        """End the ticket as dead for `reason`, and count it; `last_dead` names both.

        Raise KeyError if the ticket is not open.
        """
        self._ledger.close(ticket, "dead", reason)
        self._arrivals.dead += 1
        self._arrivals.last_dead = f"{ticket}: {reason}"
