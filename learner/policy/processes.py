"""The processes that train together, one per GPU ("rank"): their numbers, and messages between them.

torchrun or deepspeed's launcher starts the ranks. Without a launcher rank 0 is the only process.
"""

import datetime
import os
import signal
import threading
import time
from functools import lru_cache
from typing import Any

import torch.distributed as dist

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # environment variable that torchrun sets, also for a single rank
_LAUNCHER_CHECK_S = 0.1
_MESSAGE_TIMEOUT = datetime.timedelta(days=1)
"""How long a rank waits for a message from rank 0, while rank 0 waits for groups between two Updates.

The death of rank 0 is noticed at once, because its connection closes. A rank 0 that receives no groups
ends after RUN_PROGRESS_TIMEOUT_S."""


def rank() -> int:
    """Return this process's number, from 0, among those that train together: RANK, 0 if not set."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes train together: the variable WORLD_SIZE, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def set_single_process_environment() -> None:
    """Set a launcher's environment variables for a group of one process on 127.0.0.1.

    These are RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Do nothing under torchrun or
    with several processes. MASTER_PORT 0 lets the process take a free port: a parent may use the port of
    the inherited environment.
    """
    if world_size() > 1 or _LAUNCHED in os.environ:
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def end_with_launcher() -> None:
    """Start a thread that kills this process (SIGKILL) when its parent, the launcher, ends.

    Do nothing without a launcher, which is without torchrun and with one process. Ranks that outlive a
    killed torchrun would train on, and hold the run's lock against a restart.
    """
    launcher = os.getppid()

    def watch() -> None:
        """Wait until this process has another parent, as the launcher has ended; then kill it."""
        while os.getppid() == launcher:
            time.sleep(_LAUNCHER_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if world_size() > 1 or _LAUNCHED in os.environ:
        threading.Thread(target=watch, name="launcher watch", daemon=True).start()


def broadcast(value: Any) -> Any:
    """Return rank 0's `value` on every rank, where another rank's own value is not used.

    All ranks call together. A rank waits for rank 0 at most a day. Raise RuntimeError if a rank is lost.
    """
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=message_group())
    return box[0]


def gather(value: Any) -> list[Any]:
    """Return all ranks' values, in the order of the ranks, on every rank.

    All ranks call together and wait for each other, at most a day. Raise RuntimeError if a rank is lost.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=message_group())
    return values


@lru_cache(maxsize=1)
def message_group() -> dist.ProcessGroup:
    """Return the process group that carries Python objects: made at the first call, then the same one.

    The backend is gloo also on GPUs, where nccl carries the gradients: a message may take a day, a
    gradient may not. `cache_clear` forgets the group. All ranks make it together. Raise ValueError
    without a default process group.
    """
    group = dist.new_group(backend="gloo", timeout=_MESSAGE_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group
