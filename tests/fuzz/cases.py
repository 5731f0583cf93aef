"""One case: a mutated message or file, what became of it, and a fault if that may not be."""

from __future__ import annotations

import random
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.common.errors import PenstockError
from tests.fuzz.consumers import Consumers
from tests.fuzz.expected import Wrong, check_text
from tests.fuzz.files import CHANGES, SHARES
from tests.fuzz.folder import WrittenRun
from tests.fuzz.mutate import mutated
from tests.fuzz.readers import Readers
from tests.fuzz.valid import Sample, make_issued, samples
from tests.fuzz.watch import TooMuch, limits

_SHOWN = 4_000


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong, with all that is needed to see it again."""

    case: str
    what: str
    data: bytes

    @property
    def kind(self) -> str:
        """What it has in common with others of its kind."""
        about = f"{' '.join(self.case.split()[4:])}: {self.what.splitlines()[0]}"
        return re.sub(r"0x\w+|\d+", "#", about)[:120]

    def __str__(self) -> str:
        """Return the reproducer."""
        shown = self.data.hex() if len(self.data) <= _SHOWN else f"{self.data[:_SHOWN].hex()}..."
        return f"FAULT {self.case}: {self.what}\n  {len(self.data)} bytes: {shown}"


def judge(case: str, data: bytes, consume: Callable[[], str]) -> tuple[str, Fault | None]:
    """Return what became of the bytes in a word, and the fault or None."""
    try:
        with limits():
            try:
                return consume(), None
            except PenstockError as error:
                check_text(str(error))
                return "refused", None
    except (Wrong, TooMuch) as error:
        return "fault", Fault(case, str(error), data)
    except Exception as error:  # the product's own: whatever it is, it is a fault
        where = traceback.extract_tb(error.__traceback__)[-6:]
        lines = [f"  {frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in where]
        return "fault", Fault(case, "\n".join([f"{type(error).__name__}: {error!s:.200}", *lines]), data)


class MessageCases:
    """The mutated messages of a seed, by number."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        issued = make_issued(folder / "model")
        self.samples = samples(issued)
        self.consumers = Consumers(issued, folder)
        for sample in self.samples:  # what is loaded lazily counts as no case's memory
            self.consumers.take(sample, sample.data)

    def run(self, number: int) -> tuple[str, Fault | None]:
        """Make a message, hand it to its consumer and judge the result."""
        rng = random.Random(f"{self.seed}:message:{number}")
        sample, data = mutated(rng, self.samples)
        return self.judge(sample, data, f"--seed {self.seed} --only message:{number}")

    def judge(self, sample: Sample, data: bytes, name: str) -> tuple[str, Fault | None]:
        """Judge the bytes that became of a valid message."""
        what, fault = judge(
            f"{name} {sample.name} to {sample.consumer}", data, lambda: self.consumers.take(sample, data)
        )
        return f"{sample.consumer} {what}", fault


class FileCases:
    """The mutated files of a seed, by number."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.place = folder
        issued = make_issued(self.place / "model")
        self.samples = samples(issued)
        self.written = WrittenRun(self.place / "run", issued)
        self.readers = Readers(self.written)
        for kind in CHANGES:
            with self.copy() as copied:
                assert self.readers.read(kind, copied, copied / "nothing") == "read"

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """Give a copy of the run's folder, for one case."""
        copied = self.place / "copy"
        shutil.copytree(self.written.folder, copied)
        try:
            yield copied
        finally:
            shutil.rmtree(copied)

    def run(self, number: int) -> tuple[str, Fault | None]:
        """Change a file, read the run and judge the result."""
        rng = random.Random(f"{self.seed}:file:{number}")
        kind = rng.choices([*CHANGES], SHARES)[0]
        pattern, change = CHANGES[kind]
        with self.copy() as copied:
            path = rng.choice(sorted(copied.glob(pattern)))
            change(rng, path, self.samples)
            return self.judge(kind, copied, path, f"--seed {self.seed} --only file:{number}")

    def judge(self, kind: str, copied: Path, changed: Path, name: str) -> tuple[str, Fault | None]:
        """Judge what the readers make of a folder with a changed file."""
        data, where = changed.read_bytes(), changed.relative_to(copied)
        what, fault = judge(
            f"{name} {kind} {where}", data, lambda: self.readers.read(kind, copied, changed)
        )
        return f"{kind} {what}", fault
