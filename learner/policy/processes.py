"""Several processes that train as one: rank 0 leads, the others do what it says.

Rank 0 alone reads the data, writes the run's folder and speaks to Redis. What all must do together
(an Update, saving, exporting) it announces by broadcast, then does it itself. Started by torchrun or
by deepspeed's launcher; without one, rank 0 is alone.
"""

import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from penstock.common.errors import DeadlineExceeded

COLLECTIVE = {
    "update": "making an Update",
    "logprobs": "computing log-probabilities",
    "save": "writing a checkpoint",
    "load": "reading a checkpoint",
    "export": "writing weights",
    "close": "closing the policy",
}
"""Methods of a policy that every rank calls at the same time, and what the learner does then."""

_LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, also for a single rank."""

_LOOK_EVERY_S = 0.1

_WAIT = datetime.timedelta(days=1)
"""How long a follower waits for its leader between two Updates. A leader that died is noticed at
once (its connection closes), one that waits in vain for groups ends by RUN_PROGRESS_TIMEOUT_S."""


def rank() -> int:
    """This process' number, as the launcher gave it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def prepare_lone_rank() -> None:
    """Set what a launcher would have set, for a process group of one on loopback.

    On a port of its own, whatever an earlier lone rank left in the environment that we inherited.
    """
    if world_size() > 1 or _LAUNCHED in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def end_with_launcher() -> None:
    """From now on, die when the launcher does.

    Ranks that outlive a killed torchrun would train on, and keep the run's lock from their successors.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if world_size() > 1 or _LAUNCHED in os.environ:
        threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def share(value: Any) -> Any:
    """What rank 0 gives, on every rank; the others give None."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_messages())
    return box[0]


class Leader:
    """Rank 0's policy: every collective call is made by all ranks, and named as what rank 0 does."""

    def __init__(self, policy: Any, enter_phase: Callable[[str], None]) -> None:
        self._policy = policy
        self._enter_phase = enter_phase

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._policy, name)
        if name not in COLLECTIVE:
            return target

        def call(*arguments: Any) -> Any:
            self._enter_phase(COLLECTIVE[name])
            if world_size() > 1:
                share((name, arguments))
            result = target(*arguments)
            self._enter_phase("working")
            return result

        return call


def follow(policy: Any) -> None:
    """Do what the leader announces until it closes; raises DeadlineExceeded when it is gone."""
    name = ""
    while name != "close":
        try:
            name, arguments = share(None)
        except RuntimeError as error:
            raise DeadlineExceeded(f"rank {rank()} waited for rank 0, which is gone: {error}") from error
        getattr(policy, name)(*arguments)


def gather(value: Any) -> list[Any]:
    """Every rank's value, in the ranks' order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_messages())
    return values


_group: Any = None


def _messages() -> Any:
    """The group that carries messages: gloo, patient, whatever carries the gradients."""
    global _group  # noqa: PLW0603 - process groups are per process
    if _group is None:
        _group = dist.new_group(backend="gloo", timeout=_WAIT)
    return _group


def forget_messages() -> None:
    """Before the process group is left."""
    global _group  # noqa: PLW0603
    _group = None
