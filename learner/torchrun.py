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
    """Run learners by torchrun with these flags; return the code of the one that failed first, else 0.

    Signal 9 is 137. Raise torch's SignalException if told to stop.
    """
    try:
        torchrun([*flags, "-m", "penstock.learner"])
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
