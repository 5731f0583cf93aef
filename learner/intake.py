"""From the stream of outcomes to a batch: a fold whose verdicts depend on stream order and step alone.

    fold(entry)   a verdict ends its ticket at once; a group with signal is held
    form(step)    groups_per_step held groups, oldest arrivals first, if the pace allows

Pace: a group joins a batch only if afterwards, for every k, at most k x groups_per_step open tickets
fall due within k more steps (by the version they were first issued at). Credit alone does not bound
the lag: without this an overtaken ticket is trained later than max_staleness allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace

import numpy as np

from common.codec import decode_outcome
from common.errors import MalformedMessage, NoSignal
from common.messages import Group, ScoredGroup, Verdict
from common.protocol import Entry
from learner.batch import is_ahead, is_over_lag
from learner.ledger import Ledger
from learner.tickets import TicketSource


@dataclass(slots=True)
class Arrivals:
    """What came back since the last batch, for the metrics."""

    filtered: list[Verdict] = field(default_factory=list)
    dead: int = 0
    stale: int = 0
    foreign: int = 0  # of these stale, of an older contract: nothing against the questions

    @property
    def without_signal(self) -> int:
        """Tickets that ended without anything to train on."""
        return len(self.filtered) + self.dead + self.stale - self.foreign


class Intake:
    """Holds the groups that may be trained, and decides which form a batch."""

    def __init__(self, ledger: Ledger, source: TicketSource, vocab_size: int) -> None:
        self.arrivals = Arrivals()
        self._ledger = ledger
        self._source = source
        self._settings = source.settings
        self._vocab_size = vocab_size
        self._held: dict[str, ScoredGroup] = {}

    @property
    def held(self) -> Set[str]:
        """Tickets whose groups wait to be trained."""
        return self._held.keys()

    def fold(self, entry: Entry, step: int) -> None:
        """Take one outcome; one whose ticket has ended, or is held, changes nothing."""
        if entry.ticket not in self._ledger.open or entry.ticket in self._held:
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
            fits = set(outcome.rewards) == set(self._settings.rewards)  # else of an older contract
            self.arrivals.filtered.append(outcome if fits else replace(outcome, rewards={}))
        else:
            self._end_dead(entry.ticket, outcome.reason)

    def _accept(self, ticket: str, scored: ScoredGroup, step: int) -> None:
        if scored.group.ticket.id != ticket:
            self._end_dead(ticket, f"the group is of ticket {scored.group.ticket.id}")
        elif scored.group.ticket.contract != self._source.contract:
            self._end_stale(ticket, "contract")
            self.arrivals.foreign += 1
        elif set(scored.rewards) != set(self._settings.rewards):
            self._end_dead(ticket, f"it has the rewards {', '.join(scored.rewards)}")
        elif not self._is_as_issued(scored.group):
            self._end_stale(ticket, "prompt, sampling or tokens differ from what was asked for")
        elif is_ahead(scored, step):
            self._end_stale(ticket, "sampled by a version of a lineage that did not survive")
        else:
            self._held[ticket] = scored

    def _is_as_issued(self, group: Group) -> bool:
        """Whether the group answers the ticket as it is issued now, in tokens the model knows.

        Past this point it is journalled, and what cannot be trained would end every resume.
        """
        asked = self._source.train(group.ticket.id, group.ticket.version)
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
        """The next batch's groups, or None while more are to come; raises NoSignal.

        The groups leave the intake; their tickets stay open until the caller ends them.
        """
        size = self._settings.groups_per_step
        for ticket, scored in list(self._held.items()):
            if is_over_lag(scored, step, self._settings.max_staleness):
                del self._held[ticket]
                self._end_stale(ticket, "over max_staleness")
        chosen = self._choose(step, size)
        if len(chosen) < size and not self._spent():
            return None
        if not chosen and self._held:  # the pace waits for tickets that are due
            return None
        if not chosen:
            raise NoSignal(
                f"step {step + 1}: {self.arrivals.without_signal} groups in a row had nothing to learn "
                f"from ({len(self.arrivals.filtered)} without spread in their rewards, "
                f"{self.arrivals.dead} dead, {self.arrivals.stale} stale): the questions are too easy, "
                "too hard, or the rewards do not fit; see completions.jsonl and `queues audit`"
            )
        return [self._held.pop(ticket) for ticket in chosen]

    def take_arrivals(self) -> Arrivals:
        """What came back since this was last called."""
        arrivals, self.arrivals = self.arrivals, Arrivals()
        return arrivals

    def _spent(self) -> bool:
        """Whether enough groups came without signal to go on with what there is."""
        size, times = self._settings.groups_per_step, self._settings.max_resample_times
        return self.arrivals.without_signal > times * size

    def _choose(self, step: int, size: int) -> list[str]:
        due = Counter(
            self._due_within(ticket, step) for ticket in self._ledger.open if ticket.startswith("train:")
        )
        chosen: list[str] = []
        for ticket in self._held:
            if len(chosen) == size:
                break
            own = self._due_within(ticket, step)
            due[own] -= 1
            if self._keeps_pace(due, own, size - len(chosen) - 1, size):
                chosen.append(ticket)
            else:
                due[own] += 1
        return chosen

    def _due_within(self, ticket: str, step: int) -> int:
        """How many more batches after this one may still train the ticket; never below 0."""
        return max(0, self._ledger.open[ticket].step + self._settings.max_staleness - step)

    def _keeps_pace(self, due: Counter[int], own: int, room: int, size: int) -> bool:
        """Whether the others can still meet their bounds, or are no more urgent than this one."""
        waiting = 0
        for within in range(own):
            waiting += due[within]
            if waiting > within * size + room:
                return False
        return True

    def _end_dead(self, ticket: str, reason: str) -> None:
        self._ledger.close(ticket, "dead", reason)
        self.arrivals.dead += 1

    def _end_stale(self, ticket: str, reason: str) -> None:
        self._ledger.close(ticket, "stale", reason)
        self.arrivals.stale += 1
