"""The console scripts. Ctrl-C while a command's modules are imported ends it without a traceback."""

import sys
from functools import partial
from importlib import import_module


def _run(module: str) -> None:
    """Run the command whose `main` is in `module`, and exit with its code; with 130 on Ctrl-C."""
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        sys.exit(130)


learner = partial(_run, "penstock.learner.__main__")
actor = partial(_run, "penstock.actors.__main__")
rewarder = partial(_run, "penstock.rewarders.__main__")
queues = partial(_run, "penstock.common.queues")
penstock = partial(_run, "penstock.deploy.__main__")
