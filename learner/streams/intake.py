"""The intake: from the stream of outcomes to the groups of a batch.

    fold(entry)   ends the ticket of a verdict at once; holds a group that can be trained
    form(step)    drops groups over max_staleness, takes groups_per_step others in order of arrival

The result depends only on the order of the stream and on the step, so a resumed learner decides the
same. With at_max_staleness "pace" a batch takes a group only if the pace allows it
(learner/streams/pace.py), so that hardly any group is dropped; with drop or requeue the first ones.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.common.broker.work_stream import Entry
from penstock.common.errors import MalformedMessage, NoSignal
from penstock.common.wire.codec import decode_outcome
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Group, ScoredGroup, Verdict
from penstock.learner.algorithm.batch import is_ahead, is_over_lag
from penstock.learner.data.tickets import TicketSource
from penstock.learner.state.ledger import Ledger
from penstock.learner.streams.pace import choose_in_pace, keeps_pace


@dataclass(slots=True)
class Arrivals:
    """Outcomes since the last batch, for the metrics."""

    filtered: list[Verdict] = field(default_factory=list)
    dead: int = 0
    stale: int = 0
    foreign: int = 0  # of these stale, of an older contract: no sign that the questions are bad
    dropped: list[ScoredGroup] = field(default_factory=list)  # of these stale, over max_staleness
    total_dropped: int = 0  # over the whole run
    last_dead: str = ""  # a ticket and the reason why it died

    @property
    def without_signal(self) -> int:
        """Count of tickets that ended with nothing to train on; groups over max_staleness had signal."""
        return len(self.filtered) + self.dead + self.stale - self.foreign - len(self.dropped)


class Intake:
    """Holds the groups that may be trained, by ticket, and decides which of them form a batch."""

    def __init__(self, ledger: Ledger, source: TicketSource, vocab_size: int) -> None:
        self._arrivals = Arrivals()
        self.newest_version: Version | None = None
        self._ledger = ledger
        self._source = source
        self._settings = source.settings
        self._vocab_size = vocab_size
        self.held: dict[TicketId, ScoredGroup] = {}

    def fold(self, entry: Entry, step: int) -> None:
        """Take an open ticket's outcome: hold its group, or end it. Raise Questions.at's errors."""
        if entry.ticket not in self._ledger.open or entry.ticket in self.held:
            return
        try:
            outcome = decode_outcome(entry.payload)
        except MalformedMessage as error:
            self._end_dead(entry.ticket, f"malformed outcome: {error}")
            return
        if isinstance(outcome, ScoredGroup):
            self._accept(entry.ticket, outcome, step)
        elif outcome.state == "filtered":
            self._ledger.close(entry.ticket, "filtered", outcome.reason)
            fits = set(outcome.rewards) == set(self._settings.reward_names)  # else of an older contract
            self._arrivals.filtered.append(outcome if fits else replace(outcome, rewards={}))
        else:
            self._end_dead(entry.ticket, outcome.reason)

    def _accept(self, ticket: TicketId, scored: ScoredGroup, step: int) -> None:
        """Hold a trainable group; end another's ticket as dead or stale. Raise Questions.at's errors."""
        versions = [span.version for made in scored.group.rollouts for span in made.spans]
        known = [self.newest_version] if self.newest_version else []
        self.newest_version = max(versions + known, key=lambda found: (found.step, found.incarnation))
        if scored.group.ticket.id != ticket:
            self._end_dead(ticket, f"the group is of ticket {scored.group.ticket.id}")
        elif scored.group.ticket.contract != self._source.contract:
            self._end_stale(ticket, "contract")
            self._arrivals.foreign += 1
        elif set(scored.rewards) != set(self._settings.reward_names):
            self._end_dead(ticket, f"it has the rewards {', '.join(scored.rewards)}")
        elif not self._is_as_issued(scored.group):
            self._end_stale(ticket, "prompt, sampling or tokens differ from what was asked for")
        elif is_ahead(scored, step):
            self._end_stale(ticket, "sampled by a version of a lineage that did not survive")
        else:
            self.held[ticket] = scored

    def _is_as_issued(self, group: Group) -> bool:
        """Return whether the group answers the ticket as issued, with tokens that the model knows.

        A journalled group that cannot be trained would end every resume. Raise Questions.at's errors.
        """
        position = self._ledger.position(group.ticket.id)
        asked = self._source.train(group.ticket.id, group.ticket.version, position)
        return (
            np.array_equal(asked.prompt_ids, group.ticket.prompt_ids)
            and asked.sampling == group.ticket.sampling
            and asked.num_generations == group.ticket.num_generations
            and all(
                rollout.token_ids.min() >= 0
                and rollout.token_ids.max() < self._vocab_size
                and len(rollout.token_ids) <= asked.sampling.max_tokens
                for rollout in group.rollouts
            )
        )

    def form(self, step: int) -> list[ScoredGroup] | None:
        """Remove and return the groups of the next batch, or None while the batch waits for more.

        The caller ends their tickets. Held groups over max_staleness are dropped first. Raise NoSignal
        if all rounds of the batch, see `_spent`, are back without a usable group.
        """
        self._drop_over_lag(step)
        size = self._settings.groups_per_step
        chosen, may_be_smaller = self._choose(step, size)
        if len(chosen) < size and not (self._spent(len(chosen)) and may_be_smaller):
            return None
        if not chosen:
            found = self._arrivals
            last = f". The last that died is {found.last_dead}" if found.dead else ""
            raise NoSignal(
                f"step {step + 1}: {found.without_signal} groups in a row had nothing to learn from "
                f"({len(found.filtered)} without spread in their rewards, {found.dead} dead, "
                f"{found.stale} stale): the questions are too easy, too hard, or the rewards do not "
                f"fit; see `penstock samples` and `queues audit`{last}",
                found.filtered,
            )
        return [self.held.pop(ticket) for ticket in chosen]

    def take_arrivals(self) -> Arrivals:
        """Return the outcomes since the last call, and begin a new count."""
        arrivals, self._arrivals = self._arrivals, Arrivals()
        arrivals.total_dropped = self._ledger.total_dropped
        return arrivals

    def _spent(self, usable: int) -> bool:
        """Return whether all rounds of this batch are back, so that a smaller batch is taken.

        A round is groups_per_step groups; a batch has 1 + max_resample_times rounds, and without any
        usable group max_empty_updates times as many. Example: 2 groups per step, max_resample_times 1,
        1 usable group: spent when 3 others had no signal.
        """
        rounds = 1 + self._settings.max_resample_times
        if not usable:
            rounds *= self._settings.max_empty_updates
        return self._arrivals.without_signal + usable >= rounds * self._settings.groups_per_step

    def _drop_over_lag(self, step: int) -> None:
        """Drop held groups over max_staleness; with "requeue" their questions are asked again."""
        for ticket, scored in list(self.held.items()):
            if is_over_lag(scored, step, self._settings):
                self._arrivals.dropped.append(self.held.pop(ticket))
                self._arrivals.stale += 1
                self._ledger.drop(ticket, ask_again=self._settings.at_max_staleness == "requeue")

    def _choose(self, step: int, size: int) -> tuple[list[TicketId], bool]:
        """Return held tickets for a batch, and whether the pace allows a batch smaller than `size`.

        A smaller batch waits for tickets of earlier steps that are due in this batch. It does not wait
        for tickets of its own step: new ones are issued as long as there is no batch, without end.
        """
        if self._settings.at_max_staleness != "pace":
            return list(self.held)[:size], True
        train = (ticket for ticket in self._ledger.open if ticket.purpose == "train")
        due = Counter(self._due_within(ticket, step) for ticket in train)
        held = {ticket: self._due_within(ticket, step) for ticket in self.held}
        return choose_in_pace(held, due, size), keeps_pace(due, self._settings.max_staleness, size)

    def _due_within(self, ticket: TicketId, step: int) -> int:
        """Return how many batches after this one may still train the ticket, at least 0.

        Example: issued at step 3 with max_staleness 2: 2 at step 3, 0 at step 5.
        """
        return max(0, self._ledger.open[ticket].step + self._settings.max_staleness - step)

    def _end_dead(self, ticket: TicketId, reason: str) -> None:
        """End the ticket as dead, and count it. Raise KeyError if the ticket is not open."""
        self._ledger.close(ticket, "dead", reason)
        self._arrivals.dead += 1
        self._arrivals.last_dead = f"{ticket}: {reason}"

    def _end_stale(self, ticket: TicketId, reason: str) -> None:
        """End the ticket as stale, and count it. Raise KeyError if the ticket is not open."""
        self._ledger.close(ticket, "stale", reason)
        self._arrivals.stale += 1
