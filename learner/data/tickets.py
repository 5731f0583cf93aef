"""From questions to tickets: what a ticket holds follows from the seed, its id and its position."""

import hashlib
from dataclasses import dataclass

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.wire.messages import Sampling, Ticket, Version
from penstock.learner.data.order import Question, Questions
from penstock.learner.state.ledger import eval_ticket


@dataclass(frozen=True, slots=True)
class TicketSource:
    """Makes tickets; making one again gives the same one, at whatever version."""

    questions: Questions
    eval_questions: list[Question]
    settings: LearnerSettings
    contract: str

    def train(self, ticket: str, version: Version, position: int | None = None) -> Ticket:
        """The training ticket with this id.

        `position` is that of its question, over all epochs: `Ledger.position`, or else its number. The
        sampling follows from the id, so a question that is asked again is sampled anew.
        """
        if position is None:
            position = int(ticket.partition(":")[2])
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
            ),
            version=version,
            # A token older than its ticket could not be trained as late as the pace allows.
            min_step=version.step,
            contract=self.contract,
            columns=question.columns,
        )

    def evaluation(self, version: Version, index: int) -> Ticket:
        """The ticket that asks held-out question `index` of a version."""
        question = self.eval_questions[index]
        return Ticket(
            id=eval_ticket(version, index),
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
            ),
            version=version,
            min_step=version.step,
            contract=self.contract,
            columns=question.columns,
        )


def _sampling_seed(seed: int, ticket: str) -> int:
    digest = hashlib.sha256(f"{seed}:{ticket}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
