"""Mutated messages and files, against all that reads them.

    python -m tests.fuzz [--messages 300000] [--files 30000] [--seed N] [--seconds S]
    python -m tests.fuzz --seed N --only message:N

uses two processes. Prints what became of the cases and every kind of fault with one reproducer: the
seed, the number and the bytes. Exit code 1 if there is any fault, or if a process hangs or dies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.fuzz.cases import Fault
from tests.fuzz.run import log_nothing, memory_folder, run_all, run_cases


def report(counts: Counter[str], faults: list[Fault]) -> str:
    """Return the counts, and one fault of each kind."""
    lines = [f"{count:>9}  {name}" for name, count in sorted(counts.items())]
    kinds: dict[str, list[Fault]] = {}
    for fault in faults:
        kinds.setdefault(fault.kind, []).append(fault)
    lines += [f"{len(alike)} times: {alike[0]}" for alike in kinds.values()]
    return "\n".join([*lines, f"{counts.total()} cases, {len(faults)} faults of {len(kinds)} kinds"])


def main() -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="Mutate messages and files.")
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--files", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=840, help="begin nothing after this time")
    parser.add_argument("--only", default="", help="one case, as message:123 or file:45")
    options = parser.parse_args()
    wanted = {"message": options.messages, "file": options.files}
    began = time.monotonic()
    if options.only:
        log_nothing()
        kind, _, number = options.only.partition(":")
        with memory_folder() as folder:
            counts, faults = run_cases(kind, options.seed, [int(number)], folder)
    else:
        counts, faults = run_all(wanted, options.seed, options.seconds)
    print(report(counts, faults))
    whole = sum(wanted.values())
    if not options.only and counts.total() < whole:
        print(f"STOPPED after {options.seconds:g} s: {counts.total()} of {whole} cases")
    print(f"took {time.monotonic() - began:.0f} s with seed {options.seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
