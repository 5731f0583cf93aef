"""Tickets made of questions: a ticket's content follows from the seed, its id and its position."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import DataError, ValueTooLarge
from penstock.common.text import as_text
from penstock.common.wire.codec import encode
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Sampling, Ticket
from penstock.learner.data.order import Question, Questions


@dataclass(frozen=True, slots=True)
class TicketSource:
    """Makes tickets. The same id and position always give the same prompt and sampling seed.

    `contract` is the hash of the run's contract, which every ticket carries.
    """

    questions: Questions
    eval_questions: list[Question]
    settings: LearnerSettings
    contract: str

    def train(self, ticket: TicketId, version: Version, position: int | None = None) -> Ticket:
        """Return the training ticket with the id `ticket` (train:NUMBER), issued at `version`.

        `position` counts the run's questions from 0 over all epochs; None: NUMBER. The question at this
        position is asked. A question that is asked again keeps its position (train:3 and train:9 may
        both have position 3), but the sampling seed follows from the id, so it gets other samples. No
        older weights than those of `version` may sample the ticket. Raise DataError or ConfigError if
        the data set is streamed and unusable, MalformedMessage if the prompt has no token.
        """
        if position is None:
            position = ticket.number
        question = self.questions.at(position)
        settings = self.settings
        return Ticket(
            id=ticket,
            purpose="train",
            prompt_ids=question.prompt_ids,
            num_generations=settings.num_generations,
            sampling=Sampling(
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_p=settings.min_p,
                max_tokens=settings.max_completion_length,
                seed=_sampling_seed(settings.seed, ticket),
                **settings.sampling_options,
            ),
            version=version,
            # Older weights would use up max_staleness before the group arrives: it would be dropped.
            min_step=version.step,
            contract=self.contract,
            columns=question.columns,
        )

    def evaluation(self, version: Version, index: int) -> Ticket:
        """Return the ticket that asks held-out question `index`, counted from 0, for `version`.

        It asks for eval_num_generations completions, by the weights of `version` alone. The sampling is
        by eval_temperature, without top_p, top_k and min_p. The seed follows from the index, so it is
        the same for all versions. Raise IndexError if there is no such question, MalformedMessage if its
        prompt has no token.
        """
        question = self.eval_questions[index]
        return Ticket(
            id=TicketId.evaluation(version, index),
            purpose="eval",
            prompt_ids=question.prompt_ids,
            num_generations=self.settings.eval_num_generations,
            sampling=Sampling(
                temperature=self.settings.eval_temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=self.settings.max_completion_length,
                seed=_sampling_seed(self.settings.seed, f"eval:{index}"),
                **self.settings.sampling_options,
            ),
            version=version,
            min_step=version.step,
            contract=self.contract,
            columns=question.columns,
        )

    def too_large(
        self, asked: Sequence[Ticket], position_of: Callable[[TicketId], int], cause: ValueTooLarge
    ) -> DataError:
        """Return (do not raise) a DataError about the largest of `asked`: its row and longest column.

        `cause` was raised when the tickets in `asked` were sent together. `position_of` returns the
        position of a training ticket's question. Raise DataError or ConfigError if the data set is
        streamed and cannot be read again.
        """
        ticket = max(asked, key=lambda one: len(encode(one)))
        train, place = ticket.purpose == "train", ticket.id.number
        question = self.questions.at(position_of(ticket.id)) if train else self.eval_questions[place]
        columns = question.columns
        longest = max(columns, key=lambda name: len(as_text(columns[name])), default="")
        return DataError(
            f"{question.where}: the ticket {ticket.id} is too large, most of it column {longest!r}: "
            f"{cause}. Every column travels with its ticket: shorten or remove it in the data set"
        )


def _sampling_seed(seed: int, ticket: str) -> int:
    """Return the sampling seed of a ticket: a number from 0 to 2**31 - 1 that the arguments determine.

    `seed` is the run's LEARNER_SEED, `ticket` a training ticket's id or "eval:INDEX".
    """
    digest = hashlib.sha256(f"{seed}:{ticket}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
