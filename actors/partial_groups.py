"""What an actor that has to end gives back with a ticket, and how another actor continues it. No I/O.

A cut completion is continued by a request whose prompt is the ticket's and the tokens so far. The engine
then samples the same distributions as without a break, with three differences:

- Seed. An engine cannot start in the middle of a seed's random numbers. With the same seed it would
  draw the numbers again that chose the tokens so far. The seed of the rest follows from the ticket's
  seed, the completion's index and the number of tokens so far.
- Stop strings. The engine looks for them in the rest alone, so one across the break is found here.
- Structured outputs. The engine would match the rest alone against a regex or choice. The next actor
  therefore samples such a completion from the start.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.actors.conversation import turn_sampling
from penstock.common.wire.codec import decode, encode
from penstock.common.wire.limits import require
from penstock.common.wire.messages import Int32s, PartialGroup, Rollout, Sampling, Span, Ticket

Begun = tuple[Rollout | None, ...]
"""By completion of a ticket: finished, cut short (finish reason "cut"), or None without a token."""

_DROPPED = "see who else writes to the queue server"


def write_partial(ticket: Ticket, begun: Begun, actor: str) -> bytes:
    """Return the bytes of a PartialGroup of a ticket; spans without an actor get the name `actor`."""
    named = tuple(one and _with_actor(one, actor) for one in begun)
    return encode(PartialGroup(ticket.id, named))


def read_partial(data: bytes, ticket: Ticket, episodes: bool) -> Begun:
    """Decode a PartialGroup of `ticket` and return its rollouts.

    `episodes`: the run has tools, an environment or an agent. Raise MalformedMessage for other bytes,
    and if they are of another ticket or nothing that an actor gives back for this one: too many tokens,
    tokens of versions that may not sample it, a cut completion that is whole or has to match a
    structure, and in a run without episodes what is no single completion.
    """
    found = decode(data, PartialGroup)
    place = f"the partial group of {ticket.id}"
    require(found.ticket_id == ticket.id, f"{place} names another ticket; {_DROPPED}:", found.ticket_id)
    sizes = f"{place} has {len(found.rollouts)} rollouts of {ticket.num_generations}"
    require(len(found.rollouts) == ticket.num_generations, f"{sizes}, expected all; {_DROPPED}")
    for one in filter(None, found.rollouts):
        for sequence in one.sequences:
            _check_sequence(sequence, ticket, place)
        cut = one.finish_reason == "cut"
        left = ticket.sampling.max_tokens - len(one.token_ids)
        wrong = f"{place} has a cut rollout that cannot be continued; {_DROPPED}"
        require(not cut or (left > 0 and _continues(ticket.sampling) and not episodes), wrong)
        single = one.finish_reason in ("stop", "length", "cut") and one.transcript is None
        single = single and len(one.sequences) == 1 and not len(one.prompt_ids) and bool(one.mask.all())
        require(single or episodes, f"{place} has a rollout that is no completion; {_DROPPED}")
    return found.rollouts


def _check_sequence(sequence: Rollout, ticket: Ticket, place: str) -> None:
    """Raise MalformedMessage for over max_tokens tokens, or a span of a version that is not allowed.

    `place` begins the error. Allowed are the ticket's version in an evaluation, else a step of at least
    min_step.
    """
    length, most = len(sequence.token_ids), ticket.sampling.max_tokens
    require(length <= most, f"{place} has {length} tokens, expected at most {most}; {_DROPPED}")
    for span in sequence.spans:
        pinned = ticket.purpose == "eval" and span.version != ticket.version
        allowed = not pinned and span.version.step >= ticket.min_step
        require(allowed, f"{place} has tokens of a version that may not sample it; {_DROPPED}:", span)


def _continues(sampling: Sampling) -> bool:
    """Return whether a cut completion with this sampling can be continued."""
    return not (sampling.regex or sampling.choice)


def kept(begun: Begun, sampling: Sampling) -> Begun:
    """Return what can be given back of `begun`: cut completions only if they can be continued."""
    every = _continues(sampling)
    return tuple(one if every or (one and one.finish_reason != "cut") else None for one in begun)


def count_tokens(begun: Begun) -> int:
    """Return the number of tokens in all rollouts that were sampled."""
    return sum(int(sequence.mask.sum()) for one in filter(None, begun) for sequence in one.sequences)


def rest_of(ticket: Ticket, index: int, begun: Rollout | None) -> tuple[Int32s, Sampling]:
    """Return the prompt (P + T,) and the sampling by which an engine samples the rest of a completion.

    `index` is the completion's in its group, from 0, and `begun` has its T tokens so far; None: T is 0.
    For example, with 650 of at most 1,000 tokens, max_tokens is 350.
    """
    asked, length = ticket.sampling, len(begun.token_ids) if begun else 0
    sampling = turn_sampling(asked, index, length, asked.max_tokens - length)
    ids = [ticket.prompt_ids, begun.token_ids] if begun else [ticket.prompt_ids]
    return np.concatenate(ids), sampling


def join(
    begun: Rollout | None, rest: Rollout, stop: Sequence[str], text_of: Callable[[Int32s], str]
) -> Rollout:
    """Return a completion from its tokens so far and the `rest`, which ends it with its finish reason.

    With `stop` strings it ends behind the first of them, as `text_of` all its tokens says.
    """
    if begun is None:
        return rest
    length = len(begun.token_ids)
    later = (replace(one, start=one.start + length, end=one.end + length) for one in rest.spans)
    whole = replace(
        rest,
        token_ids=np.concatenate([begun.token_ids, rest.token_ids]),
        logprobs=np.concatenate([begun.logprobs, rest.logprobs]),
        mask=np.concatenate([begun.mask, rest.mask]),
        spans=(*begun.spans, *later),
    )
    return _end_at_stop(whole, stop, text_of) if stop else whole


def _end_at_stop(whole: Rollout, stop: Sequence[str], text_of: Callable[[Int32s], str]) -> Rollout:
    """Return a completion as far as the token that completes the first of the `stop` strings.

    Without one it is returned as it is.
    """
    ids = whole.token_ids

    def has_stop(count: int) -> bool:
        """Return whether the text of the first `count` tokens has a stop string."""
        text = text_of(ids[:count])
        return any(one in text for one in stop)

    count = 1 + bisect_left(range(1, len(ids) + 1), True, key=has_stop)
    if count > len(ids):
        return whole
    return replace(
        whole, token_ids=ids[:count], logprobs=whole.logprobs[:count], mask=whole.mask[:count],
        spans=tuple(_until(count, whole.spans)), finish_reason="stop",
    )  # fmt: skip


def _until(end: int, spans: Sequence[Span]) -> list[Span]:
    """Return the spans of the first `end` tokens."""
    return [replace(one, end=min(one.end, end)) for one in spans if one.start < end]


def _with_actor(rollout: Rollout, actor: str) -> Rollout:
    """Return a rollout, with its earlier sequences, whose spans without an actor get the name of one."""
    return replace(
        rollout,
        spans=tuple(one if one.actor else replace(one, actor=actor) for one in rollout.spans),
        earlier=tuple(_with_actor(one, actor) for one in rollout.earlier),
    )
