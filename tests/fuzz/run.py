"""The cases of a seed in two processes."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import structlog
import torch

from tests.fuzz.cases import Fault, FileCases, MessageCases

PROCESSES = 2
_CHUNK = {"message": 1_000, "file": 100}
_HANGS_AFTER_S = 300  # a chunk takes some 5 s; code that a signal cannot interrupt ends its process
_MOST_DATA = 8 << 30


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Give an empty folder, in memory if possible: a sync costs nothing there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="penstock-fuzz-", dir=memory if memory.is_dir() else None
    ) as made:
        yield Path(made)


def log_nothing() -> None:
    """Keep the product's warnings about damage from the terminal."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _begin_process() -> None:
    """Log nothing, use one thread, and let no case take the machine's memory."""
    log_nothing()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_DATA, resource.getrlimit(resource.RLIMIT_DATA)[1]))


@cache
def cases(kind: str, seed: int, folder: Path) -> MessageCases | FileCases:
    """Return this process's cases of a seed, which write below the folder."""
    own = folder / f"{kind}-{os.getpid()}"
    own.mkdir()
    return MessageCases(seed, own) if kind == "message" else FileCases(seed, own)


def run_cases(
    kind: str, seed: int, numbers: Iterable[int], folder: Path
) -> tuple[Counter[str], list[Fault]]:
    """Run cases; return how many ended in which way, and the faults."""
    counts: Counter[str] = Counter()
    faults = []
    for number in numbers:
        what, fault = cases(kind, seed, folder).run(number)
        counts[f"{kind}: {what}"] += 1
        faults += [fault] if fault else []
    return counts, faults


def _run_portion(kind: str, seed: int, numbers: range, folder: Path) -> tuple[Counter[str], list[Fault]]:
    """Return what `run_cases` returns. A portion that takes too long ends the process."""
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, exit=True)
    found = run_cases(kind, seed, numbers, folder)
    faulthandler.cancel_dump_traceback_later()
    return found


def chunks(wanted: dict[str, int], seed: int) -> Iterator[tuple[str, int, range]]:
    """Yield the work of all cases in portions; messages and files take turns."""
    starts = [
        (start / count, kind, start)
        for kind, count in wanted.items()
        for start in range(0, count, _CHUNK[kind])
    ]
    for _, kind, start in sorted(starts):
        yield kind, seed, range(start, min(wanted[kind], start + _CHUNK[kind]))


def run_all(wanted: dict[str, int], seed: int, seconds: float) -> tuple[Counter[str], list[Fault]]:
    """Run cases in two processes, and begin no portion after so many seconds.

    A process that dies or hangs is a fault of its portion.
    """
    ends = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    faults: list[Fault] = []
    spawn = get_context("spawn")
    with memory_folder() as folder, ProcessPoolExecutor(PROCESSES, spawn, _begin_process) as pool:
        portions = {
            pool.submit(_run_portion, *portion, folder): portion for portion in chunks(wanted, seed)
        }
        for done in as_completed(portions):
            try:
                found = done.result()
            except BrokenProcessPool as error:
                faults.append(Fault(f"--seed {seed} {portions[done]}", f"a process ended: {error}", b""))
                break
            except CancelledError:
                continue
            counts += found[0]
            faults += found[1]
            if time.monotonic() > ends:
                for portion in portions:
                    portion.cancel()
    return counts, faults
