"""Start a learner of several processes by torchrun, and end with the learner's exit code.

    python -m penstock.learner.torchrun --standalone --nproc-per-node 2

The flags are torchrun's. It ends with 1 whatever went wrong, so a learner that cannot go on would be
started again.
"""

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def launch(flags: Sequence[str]) -> int:
    """Run learners by torchrun with these flags; return the exit code of rank 0, 1 if another failed.

    Only rank 0 reads data and settings and talks to the queue server: a follower that lost it can be
    started again. Signal 9 is 137. Raise torch's SignalException if told to stop.
    """
    try:
        torchrun([*flags, "-m", "penstock.learner"])
    except ChildFailedError as error:
        first = error.failures.get(0)
        code: int = first.exitcode if first else 1
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
