"""The names of a run's keys on the queue server."""

from penstock.common.wire.ids import Purpose

GROUP = "workers"
"""The one consumer group of every work stream."""


class Keys:
    """The names of a run's keys on the queue server: Keys("demo").dead is "penstock:{demo}:dead".

    All keys carry the hash tag {run}, the run's name, so that a cluster keeps a run in one slot. The
    streams: tickets, eval_tickets -> rollouts -> scored (training) or evaluated (evaluation).
    """

    def __init__(self, run: str) -> None:
        prefix = f"penstock:{{{run}}}:"
        self.tickets = prefix + "tickets"
        self.eval_tickets = prefix + "eval_tickets"
        self.rollouts = prefix + "rollouts"
        self.scored = prefix + "scored"
        self.evaluated = prefix + "evaluated"
        self.dead = prefix + "dead"  # stream: what failed too often, with the reason
        self.fence = prefix + "fence"  # hash: the learner's claim and heartbeat, see CONTRIBUTING.md
        self.open = prefix + "open"  # hash: ticket -> the entry that holds it, first version
        self.ledger = prefix + "ledger"  # hash: issued, and a count per end state
        self.malformed = prefix + "malformed"  # hash: cause -> entries that were deleted unread
        self.contract = prefix + "contract"
        self.weights = prefix + "weights"  # the announced version
        self.state = prefix + "state"  # "running" or "ended"
        self.deltas = prefix + "deltas"  # hash: parts of what changed in the newest versions
        self.costs = prefix + "costs"  # hash: seconds that actors and rewarders spent, by phase
        self.processes = prefix + "processes"  # hash: by name, what a process tells people of itself
        self.supervisors = prefix + "supervisors"  # hash: by name, what a `penstock up` runs
        self.scale = prefix + "scale"  # hash: how many processes a `penstock up` is to run

    def tickets_for(self, purpose: Purpose) -> str:
        """Return the key of the stream of tickets: tickets for "train", eval_tickets for "eval"."""
        return self.tickets if purpose == "train" else self.eval_tickets

    def outcomes_for(self, purpose: Purpose) -> str:
        """Return the key of the stream of results: scored for "train", evaluated for "eval"."""
        return self.scored if purpose == "train" else self.evaluated

    @property
    def work_streams(self) -> tuple[str, ...]:
        """The keys tickets, eval_tickets and rollouts: streams of work for actors and rewarders."""
        return (self.tickets, self.eval_tickets, self.rollouts)

    @property
    def outcome_streams(self) -> tuple[str, ...]:
        """The keys scored and evaluated: the streams of results, which the learner reads by position."""
        return (self.scored, self.evaluated)

    @property
    def all(self) -> tuple[str, ...]:
        """Every key of the run, in a fixed order: tickets first, scale last."""
        return tuple(vars(self).values())
