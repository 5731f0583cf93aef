"""The `penstock` command: everything that concerns a run as a whole.

Subcommands are imported when they are called, so that help and mistakes answer at once.
"""

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "up": ("penstock.deploy.up", "run learner, actors, rewarders and queue server on this machine"),
    "demo": ("penstock.deploy.demo.run", "teach a tiny model to add, on this machine's CPU"),
    "evaluate": (
        "penstock.deploy.evaluate",
        "answer held-out questions with a model: pass@1, avg@k, maj@k",
    ),
    "samples": (
        "penstock.deploy.samples",
        "read what a run sampled: best, worst, without spread, truncated",
    ),
    "replay": ("penstock.deploy.replay", "train a run again from its journal alone, and compare"),
    "convert-smollm2": ("penstock.deploy.smollm2", "make a model folder of the packaged SmolLM2-135M"),
}
"""By name: the module whose main(arguments) does it, and a line of help."""


def main() -> None:
    """Console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one subcommand; returns the exit code."""
    name, rest = parse_arguments(arguments)
    from penstock.common.errors import PenstockError
    from penstock.common.text import printable

    try:
        return int(import_module(COMMANDS[name][0]).main(rest) or 0)
    except PenstockError as error:
        print(printable(f"penstock: {type(error).__name__}: {error}"), file=sys.stderr, flush=True)
        return error.exit_code


def parse_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """The subcommand and what follows it; exits on --help and on mistakes."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Post-train language models by reinforcement learning over Redis streams.",
        epilog="The roles are commands of their own: learner, actor, rewarder; and `queues` looks "
        "at a run. `penstock COMMAND --help` says more.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        subparsers.add_parser(name, help=summary, add_help=False)
    found, rest = parser.parse_known_args(arguments[:1])
    return found.command, rest + arguments[1:]


if __name__ == "__main__":
    main()
