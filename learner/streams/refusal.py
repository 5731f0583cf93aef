"""Which groups the learner refuses: all that are no answer to a ticket as issued, by published weights.

Actors and rewarders hand back the ticket with their answer. Whoever can write to their streams can alter
each part of it. The learner therefore makes the ticket again, and compares. A group that is refused is
neither trained nor written to the journal; its ticket ends as stale.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal

from penstock.common.log import get_logger
from penstock.common.text import printable
from penstock.common.wire.codec import encode, pack, unpack
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Outcome, Rollout, ScoredGroup, Ticket, Verdict
from penstock.learner.data.tickets import TicketSource
from penstock.learner.state.ledger import Ledger

log = get_logger(__name__)

Reason = Literal[
    "ticket", "contract", "generations", "sampling", "prompt", "columns", "issue",
    "version", "hash", "tokens", "episode", "rewards",
]  # fmt: skip

MEANING: dict[Reason, str] = {
    "ticket": "it answers another ticket",
    "contract": "it was made under another contract",
    "generations": "another number of completions was asked for",
    "sampling": "it was sampled with other settings than asked for",
    "prompt": "its prompt is not the one that was asked",
    "columns": "its columns are not those of the question",
    "issue": "its ticket names another version than that of its issue",
    "version": "a token is of a version that was not published, or is older or other than asked for",
    "hash": "a token was sampled by other weights than the published ones of its version",
    "tokens": "a completion is too long, or has tokens that the model does not know",
    "episode": "it has answers of tools or several sequences, and the run has no tools or no agent",
    "rewards": "its rewards are not those of the contract",
}
"""What each reason says of a group."""

_FIELDS: dict[str, Reason] = {
    "id": "ticket", "purpose": "ticket", "contract": "contract", "num_generations": "generations",
    "sampling": "sampling", "prompt_ids": "prompt", "columns": "columns", "version": "issue",
    "min_step": "issue",
}  # fmt: skip
"""The reason that each field of a ticket stands for, in the order in which they are compared."""


def why_refused(
    scored: ScoredGroup,
    asked: Ticket,
    published: Mapping[Version, str],
    vocab_size: int,
    rewards: Collection[str],
    longest_prompt: int = 0,
    episodes: bool = False,
    most_sequences: int = 1,
) -> Reason | None:
    """Return why a group is no answer to the ticket `asked`, the first reason found; None if it is one.

    `published` maps versions to the hash of their weights, and `rewards` are the contract's names. Each
    field of the ticket is compared as bytes: 1, 1.0 and True differ. `vocab_size` is above all token ids
    of the model. `longest_prompt` is the most tokens of a rollout's own prompt, 0 in a run without an
    environment or agent. `episodes`: the run has tools, an environment or an agent. Without them each
    rollout must be one completion: all tokens sampled, no transcript, ended by "stop" or "length".
    `most_sequences` is the most sequences of a rollout. Tokens of an evaluation must be of the ticket's
    version. MEANING explains the reasons.
    """
    found = scored.group.ticket
    if encode(found) != encode(asked):
        return _first_difference(found, asked)
    if set(scored.rewards) != set(rewards):
        return "rewards"
    for rollout in scored.group.rollouts:
        for sequence in rollout.sequences:
            if reason := _why_sequence_refused(sequence, asked, published, vocab_size):
                return reason
            if len(sequence.prompt_ids) > longest_prompt:
                return "prompt"
        fits = len(rollout.sequences) <= most_sequences
        if not fits or not (episodes or _is_completion(rollout)):
            return "episode"
    return None


def _why_sequence_refused(
    sequence: Rollout, asked: Ticket, published: Mapping[Version, str], vocab_size: int
) -> Reason | None:
    """Return why the tokens of a sequence are no answer to the ticket, None if they are one.

    "version": a span's version is not in `published`, has a step below min_step or, in an evaluation, is
    not the ticket's. "hash": its hash is not the published one. "tokens": an id of the prompt or
    completion is `vocab_size` or more, or the completion is longer than max_tokens.
    """
    for span in sequence.spans:
        other = asked.purpose == "eval" and span.version != asked.version
        if span.version not in published or span.version.step < asked.min_step or other:
            return "version"
        if published[span.version] != span.hash:
            return "hash"
    unknown = any(ids.max(initial=0) >= vocab_size for ids in (sequence.token_ids, sequence.prompt_ids))
    return "tokens" if unknown or len(sequence.token_ids) > asked.sampling.max_tokens else None


def _is_completion(rollout: Rollout) -> bool:
    """Return whether a rollout is a single completion, all of its tokens sampled, without a transcript.

    The completion ended with an end token or stop string ("stop"), or at the longest length ("length").
    """
    single = rollout.transcript is None and rollout.finish_reason in ("stop", "length")
    return single and bool(rollout.mask.all())


def _first_difference(found: Ticket, asked: Ticket) -> Reason:
    """Return the reason for the first field, in the order of _FIELDS, in which two tickets differ.

    Raise StopIteration if all fields are equal.
    """
    bodies = (unpack(encode(ticket))[2] for ticket in (found, asked))
    ours, theirs = ([pack(part) for part in body] for body in bodies)
    differ = {name for name, one, two in zip(Ticket.__slots__, ours, theirs, strict=True) if one != two}
    return next(reason for name, reason in _FIELDS.items() if name in differ)


class OutcomeCheck:
    """Compares groups with what the learner issued and published; counts refused ones by reason.

    `ledger` has the open tickets and the published versions, `source` makes tickets again, and
    `vocab_size` is above all token ids of the model.
    """

    def __init__(self, ledger: Ledger, source: TicketSource, vocab_size: int) -> None:
        self._ledger = ledger
        self._source = source
        self._vocab_size = vocab_size
        self.refused: Counter[Reason] = Counter()  # since `take_refused`
        self._logged: set[Reason] = set()

    def why_refused(self, ticket: TicketId, outcome: Outcome) -> Reason | None:
        """Return why an outcome is no answer to the open `ticket`, None if the outcome is usable.

        Of a verdict only the ticket's id is compared. A refusal is counted in `refused`, and logged if
        it is the first for its reason. Raise KeyError if a group's ticket is not open, DataError or
        ConfigError if a streamed data set is unusable.
        """
        if isinstance(outcome, Verdict):
            reason: Reason | None = None if outcome.ticket_id == ticket else "ticket"
        else:
            settings, published = self._source.settings, self._ledger.versions
            own = settings.max_prompt_length if settings.environment or settings.agent else 0
            reason = why_refused(
                outcome, self._asked(ticket), published, self._vocab_size, settings.reward_names,
                own, settings.has_episodes, settings.most_sequences,
            )  # fmt: skip
        if reason:
            self.refused[reason] += 1
            self._log(ticket, outcome, reason)
        return reason

    def take_refused(self) -> Counter[Reason]:
        """Return by reason how many outcomes were refused since the last call, and count anew."""
        refused, self.refused = self.refused, Counter()
        return refused

    def _asked(self, ticket: TicketId) -> Ticket:
        """Return an open ticket as it was issued. Raise KeyError if the ticket is not open.

        Raise DataError or ConfigError if the question is in a streamed data set that is unusable.
        """
        first = self._ledger.open[ticket]
        if ticket.purpose == "eval":
            return self._source.evaluation(first, ticket.number)
        return self._source.train(ticket, first, self._ledger.position(ticket))

    def _log(self, ticket: TicketId, outcome: Outcome, reason: Reason) -> None:
        """Log a warning for the first refusal with this reason, with ticket, metric and makers.

        The makers are the actor and the rewarder of a group, "" for a verdict. Later refusals with the
        same reason are not logged.
        """
        if reason in self._logged:
            return
        self._logged.add(reason)
        makers = f"{outcome.group.actor}, {outcome.rewarder}" if isinstance(outcome, ScoredGroup) else ""
        log.warning(
            f"Refused the answer to {ticket}: {MEANING[reason]}. Later ones are only counted.",
            metric=f"refused/{reason}",
            made_by=printable(makers)[:200],
        )
