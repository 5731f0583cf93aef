"""`penstock replay`: the learner's replay, in a process of its own."""

import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Exit code of `learner.replay`."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.learner.replay", *arguments], check=False
    ).returncode
