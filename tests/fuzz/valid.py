"""A run's valid messages, each as the learner issued or expects it, and as a tree to take apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from blake3 import blake3

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.transfer.model_folder import shared_files
from penstock.common.wire import codec
from penstock.common.wire.contract import Contract, hash_tokenizer
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import (
    ANSWER,
    Delta,
    Group,
    PartialGroup,
    Rollout,
    ScoredGroup,
    Ticket,
    Verdict,
    Version,
    Weights,
)
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.data.order import Question, Shuffled
from penstock.learner.data.tickets import TicketSource
from tests.fuzz.packing import Path as TreePath
from tests.fuzz.packing import Tree, children, to_tree
from tests.learner.builders import make_group
from tests.tiny_tokenizer import save_tokenizer

STEP = 3
"""The Updates made so far. Tickets were issued at version 1.2, and 1.3 is announced."""
ISSUED_AT, NEWEST = Version(1, 2), Version(1, 3)
VOCABULARY = 32
MODEL = "/fuzz/model"
"""The model folder in messages: a case has the same bytes wherever its files are."""
NO_WEIGHTS = blake3(b"").hexdigest()
"""The hash of the published weights of version 1.3."""
WEIGHTS = {"accuracy": 1.0, "format": 0.5}
TRAIN, EVAL = TicketId.train(7), TicketId.evaluation(NEWEST, 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid message: the consumer that gets it, its name, and its bytes as a tree."""

    consumer: str
    name: str
    message: Any
    tree: Tree
    data: bytes


@dataclass(frozen=True)
class Issued:
    """What the learner of this run knows: settings, contract and where its tickets come from."""

    model: Path
    settings: LearnerSettings
    contract: Contract
    source: TicketSource

    @property
    def train(self) -> Ticket:
        """The training ticket that is open."""
        return self.source.train(TRAIN, ISSUED_AT)

    @property
    def eval(self) -> Ticket:
        """The evaluation ticket that is open."""
        return self.source.evaluation(NEWEST, 0)


def make_issued(model: Path) -> Issued:
    """Return the knowledge of a learner; its model folder holds a tokenizer."""
    save_tokenizer(model)
    settings = LearnerSettings(
        num_generations=3, groups_per_step=1, max_staleness=2, max_completion_length=8,
        eval_num_generations=2, eval_temperature=0.7, rewards=[*WEIGHTS], reward_weights=[1.0, 0.5],
    )  # fmt: skip
    rewards = tuple(RewardSpec(name, weight, options={"n": 1}) for name, weight in WEIGHTS.items())
    contract = Contract(
        MODEL, hash_tokenizer(model), "float32", 40, rewards, True, 1, 4,
        model_files=shared_files(model),
    )  # fmt: skip
    questions = [_question(number) for number in range(10)]
    source = TicketSource(Shuffled([questions], [], 42, True), questions[:1], settings, contract.hash)
    return Issued(model, settings, contract, source)


def _question(number: int) -> Question:
    columns = {
        "prompt": f"{number}+1=", "solution": str(number + 1), "level": number, "share": 0.25 * number,
        "tags": ["a", None, {"deep": [1, 2.5, True]}], "empty": {}, "name": "\u00e9\u4e2d",
    }  # fmt: skip
    return Question(np.array([3, 4 + number, 5], dtype="<i4"), columns)


def scored(ticket: Ticket) -> ScoredGroup:
    """Return a group that answers a ticket, with all that rewards may log."""
    size = ticket.num_generations
    spans = [(ISSUED_AT.step, 2), (NEWEST.step, 3)] if ticket.purpose == "train" else [(NEWEST.step, 4)]
    made = make_group(ticket, spans=spans, rewards=(1.0, 0.0, None)[:size])
    rollouts = tuple(
        replace(one, logprobs=np.linspace(-2, -0.1, len(one.token_ids)).astype("<f4"))
        for one in made.group.rollouts
    )
    extra = {"seconds": (0.5, None, 2.0)[:size], "note": ("a", "b", "c")[:size]}
    if ticket.purpose == "eval":
        extra |= {ANSWER: ("1", "2", "3")[:size]}
    return replace(
        made, group=replace(made.group, rollouts=rollouts), texts=("12", "a", "b")[:size], extra=extra,
        rewards={"accuracy": (1.0, 0.0, None)[:size], "format": (0.5, -1.0, None)[:size]},
        failures=("", "", "it hung")[:size] if size > 2 else (), metrics={"letters": 3.5},
    )  # fmt: skip


def partial(whole: ScoredGroup) -> PartialGroup:
    """Return a finished, a cut and no rollout of a group that another actor had to give back."""
    one, two, *_ = (
        replace(each, spans=tuple(replace(span, actor="actor-0") for span in each.spans))
        for each in whole.group.rollouts
    )
    return PartialGroup(TRAIN, (one, replace(two, finish_reason="cut"), None))


def samples(issued: Issued) -> list[Sample]:
    """Return a valid message for every consumer, the learner's intake first."""
    train, evaluation = scored(issued.train), scored(issued.eval)
    rewards = {"accuracy": (0.0, 0.0, None), "format": (0.5, 0.5, None)}
    filtered = Verdict(TRAIN, "filtered", "no spread", rewards, (3, 5, 2), {"letters": 2.0}, "1+1=", "2")
    messages = [
        ("intake", train), ("intake", filtered), ("intake", Verdict(TRAIN, "dead", "failed 3 times")),
        ("evaluation", evaluation), ("evaluation", Verdict(EVAL, "dead", "failed 3 times")),
        ("rewarder", train.group), ("rewarder", evaluation.group),
        ("actor", issued.train), ("actor", issued.eval), ("partial", partial(train)),
        ("weights", Weights(
            NEWEST, f"{MODEL}/000001-00000003", NO_WEIGHTS, "cd" * 32, 64, "http://10.0.0.5:1", "token",
            deltas=(Delta(NEWEST, "cd" * 32, "ef" * 32, 9),),
        )),
        ("contract", issued.contract),
    ]  # fmt: skip
    return [_sample(consumer, message) for consumer, message in messages]


def _sample(consumer: str, message: Any) -> Sample:
    data = codec.encode(message)
    return Sample(consumer, type(message).__name__, message, to_tree(codec.unpack(data)), data)


@cache
def field_types(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the name and type of each field of a message, in order."""
    return tuple(get_type_hints(kind).items())


def named_paths(kind: Any, tree: Tree, name: str = "", path: TreePath = ()) -> dict[str, TreePath]:
    """Return the path of every field in a message's body, as "group.rollouts.0.logprobs"."""
    found = {name: path} if name else {}
    dotted = f"{name}." if name else ""
    if hasattr(kind, "__dataclass_fields__"):
        for place, (field, below) in enumerate(field_types(kind)):
            found |= named_paths(below, tree[place], dotted + field, (*path, place))
    elif get_origin(kind) is tuple:
        for place, child in enumerate(children(tree)):
            found |= named_paths(get_args(kind)[0], child, f"{dotted}{place}", (*path, place))
    elif get_origin(kind) is dict:
        flat = children(tree)
        for place in range(0, len(flat), 2):
            value = get_args(kind)[1]
            found |= named_paths(value, flat[place + 1], f"{dotted}{flat[place]}", (*path, place + 1))
    return found


KINDS = {
    kind.__name__: kind
    for kind in (Ticket, Group, PartialGroup, ScoredGroup, Verdict, Weights, Contract, Rollout)
}
