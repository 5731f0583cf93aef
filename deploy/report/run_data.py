"""What a report needs of a run, read from its folder. What cannot be read is named, and left out."""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dotenv import dotenv_values

from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.atomic import each_json_line
from penstock.common.files.reading import DAMAGE, explain, parse_json, reading
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.audit import JournalAudit, audit_journal
from penstock.common.text import hide_passwords
from penstock.deploy.samples import completion_files, read_table, select

T = TypeVar("T")
Points = dict[int, float]
"""A curve: by step a finite number."""

SAMPLES, _TABLES = 4, 50
"""How many best and worst completions are shown, and of how many of the newest steps."""

_LARGEST = 1e100  # of a drawn value: the library for curves fails near the limit of a float
_DEFAULT = re.compile(r"# (?:set this one yourself: )?(LEARNER_\w+)=(.*)")


@dataclass(slots=True)
class RunData:
    """A run's figures, and in `missing` a sentence for each thing that could not be read."""

    path: Path
    label: str
    rows: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step, ascending
    heldout: dict[str, Points] = field(default_factory=dict)  # mean by reward and evaluated step
    best: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    audit: JournalAudit | None = None
    set_values: dict[str, str] = field(default_factory=dict)  # settings that are not the default
    defaults: dict[str, str] = field(default_factory=dict)
    record: dict[str, str] = field(default_factory=dict)  # run.json, such as {"machine device": "cpu"}
    missing: list[str] = field(default_factory=list)

    def points(self, name: str) -> Points:
        """Return the curve of a metric; {} if no step has it."""
        return {step: row[name] for step, row in self.rows.items() if name in row}


def check_is_run(path: Path) -> RunFolder:
    """Return the run's folder at `path`. Raise ConfigError if nothing there is a run's."""
    folder = RunFolder(path)
    parts = (folder.metrics, folder.record, folder.claims, folder.completions, folder.evaluations)
    if any(part.exists() for part in parts):
        return folder
    raise ConfigError(
        f"{path} is no run's folder: expected metrics.jsonl, run.json or claims/ in it. Name a folder "
        "such as runs/first"
    )


def read_run(path: Path, label: str, parts: Sequence[str] = ()) -> RunData:
    """Return what the folder `path` tells of its run, which is called `label` in the report.

    Only `parts` are read, such as "curves"; all by default. Raise ConfigError if the folder is no run's.
    """
    folder, data = check_is_run(path), RunData(path, label)
    for what in parts or _PARTS:
        try:
            _PARTS[what](folder, data)
        except FileNotFoundError as error:
            data.missing.append(f"{what}: {error.filename} does not exist; a learner's start writes it")
        except (PenstockError, OSError, ImportError) as error:
            data.missing.append(f"{what}: {error}")
        except DAMAGE as error:
            data.missing.append(f"{what}: damaged ({explain(error)})")
    return data


def _read_metrics(folder: RunFolder, data: RunData) -> None:
    """Fill the metrics. Of two rows of a step the later counts. Raise ConfigError for an empty file."""
    rows: dict[int, dict[str, float]] = {}
    for row in _lines(folder.metrics, data):
        found = _numbers(row)
        rows[row["step"]] = {sys.intern(name): value for name, value in found.items()}
    data.rows = dict(sorted(rows.items()))
    if not rows:
        raise ConfigError(f"{folder.metrics} has no step yet: wait for the first one")


def _read_evaluations(folder: RunFolder, data: RunData) -> None:
    """Fill the held-out means. Of two evaluations of a step the later counts.

    An answer that could not be scored is left out of its mean. Raise ConfigError without an evaluation.
    """
    found: dict[int, tuple[str, dict[str, list[float]]]] = {}
    for row in _lines(folder.evaluations, data, version=str, rewards=list):
        if found.get(row["step"], ("", {}))[0] != row["version"]:
            found[row["step"]] = row["version"], {}
        for rewards in row["rewards"]:
            for name, value in _numbers(rewards).items():
                total = found[row["step"]][1].setdefault(name, [0.0, 0.0])
                total[:] = total[0] + value, total[1] + 1
    for step, (_, sums) in sorted(found.items()):
        for name, (total_reward, count) in sums.items():
            data.heldout.setdefault(name, {})[step] = total_reward / count
    if not data.heldout:
        raise ConfigError("the run has no evaluation; LEARNER_EVAL_DATASET or _HOLDOUT asks for some")


def _read_samples(folder: RunFolder, data: RunData) -> None:
    """Fill the best and worst completions of the newest steps, one of a group.

    The memory is that of one table and the completions kept. Raise ConfigError without completions.
    """
    for path in islice(completion_files(folder.path).values(), _TABLES):
        try:
            rows = read_table(path)
        except ConfigError as error:
            data.missing.append(f"samples: {error}")
            continue
        data.best = select([*data.best, *rows], "best")[:SAMPLES]
        data.worst = select([*data.worst, *rows], "worst")[:SAMPLES]


def _read_audit(folder: RunFolder, data: RunData) -> None:
    """Fill the audit. Raise ConfigError if the journal is missing or damaged."""
    data.audit = audit_journal(folder)


def _read_settings(folder: RunFolder, data: RunData) -> None:
    """Fill the settings, passwords as ***. Raise ConfigError if there is none, OSError for no file."""
    text = folder.settings.read_text(encoding="utf-8", errors="replace")
    given = dotenv_values(stream=StringIO(text), interpolate=False)
    data.set_values = {
        name: _without_password(name, value or "")
        for name, value in given.items()
        if name.startswith("LEARNER_")
    }
    found = (match for line in text.splitlines() if (match := _DEFAULT.fullmatch(line)))
    data.defaults = {match[1]: _without_password(match[1], match[2].strip("'")) for match in found}
    if not data.set_values and not data.defaults:
        raise ConfigError(f"{folder.settings} has no setting: the learner's next start writes it again")


def _without_password(name: str, value: str) -> str:
    """Return the value of the variable `name` with *** for passwords in it."""
    return hide_passwords(f"{name}={value}").partition("=")[2]


def _read_record(folder: RunFolder, data: RunData) -> None:
    """Fill what run.json tells, without its settings. Raise ConfigError for damage, OSError."""
    with reading(folder.record, "The next start of the learner writes the file again"):
        found: Any = parse_json(folder.record.read_bytes())
        data.record = dict(_flat({name: found[name] for name in found if name != "settings"}))


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of each value in nested maps; a name begins with those of the outer maps."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name} ")
        else:
            yield f"{before}{name}", hide_passwords(str(value))


def _lines(path: Path, data: RunData, **fields: type) -> Iterator[dict[str, Any]]:
    """Yield the whole rows of a JSON-lines file, then note how many lines were damaged.

    Raise OSError if the file cannot be read, ConfigError if there is none.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: correct the folder, or wait for its learner")
    damaged = 0
    for row in each_json_line(path, **fields):
        if row is None:
            damaged += 1
        else:
            yield row
    if damaged:
        data.missing.append(f"{path}: {damaged} damaged lines are left out")


def _numbers(values: object) -> dict[str, float]:
    """Return those of a map's values that are finite numbers; {} for another thing than a map."""
    found = values.items() if isinstance(values, dict) else ()
    return {name: number for name, value in found if (number := _number(value)) is not None}


def _number(value: object) -> float | None:
    """Return a number as a float; None for another thing, NaN, and what is too large to be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if abs(value) < _LARGEST else None


_PARTS: Mapping[str, Callable[[RunFolder, RunData], None]] = {
    "curves": _read_metrics,
    "held-out questions": _read_evaluations,
    "samples": _read_samples,
    "audit": _read_audit,
    "settings": _read_settings,
    "machine": _read_record,
}
"""By name the parts of a report, and what reads them."""
