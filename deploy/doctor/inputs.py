"""Checks of what a run begins with: required settings, the model's folder, files of data and code."""

import os
import re
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.text import HUB_ID
from penstock.deploy.doctor.finding import Finding

REMEDY = "name what is there, or copy it there"
_FILE = re.compile(r"\.((jsonl|ndjson|json|csv|tsv)(\.gz)?|parquet|arrow|py)(?![\w-])", re.IGNORECASE)


def check_inputs(learner: LearnerSettings) -> Iterator[Finding]:
    """Yield an error per required setting that is empty, and for absent models, data sets and code."""
    model, faults = learner.model, []
    none = f"no such file or folder (seen from {Path.cwd()})"
    if os.path.isdir(model):
        names = ("config.json", "tokenizer.json", "*.safetensors")
        lacking = [name for name in names if not any(Path(model).glob(name))]
        faults = [f"LEARNER_MODEL={model}: no {name} is there" for name in lacking]
    elif not HUB_ID.fullmatch(model):
        faults = [f"LEARNER_MODEL={model}: {none}" if model else "LEARNER_MODEL is not set"]
    if not (learner.dataset or learner.evaluate_only):
        faults.append("LEARNER_DATASET is not set")
    for variable in ("dataset", "eval_dataset", "rewards", "tools", "environment", "agent", "loss"):
        asked = getattr(learner, variable)
        given = [asked] if isinstance(asked, str) else asked
        absent = [name for name in given if name and not _may_exist(name)]
        faults += [f"LEARNER_{variable.upper()}={name}: {none}" for name in absent]
    why = "the learner refuses to start"
    yield from (Finding("inputs", "error", fault, why, f"do: {REMEDY}") for fault in faults)


def _may_exist(source: str) -> bool:
    """Return whether NAME[#COUNT], or the file of FILE.py:NAME, is here, or may be elsewhere."""
    name = source.rpartition("#")[0] or source
    path = re.split(r"(?<=\.py):", name)[0]
    may_be_id = HUB_ID.fullmatch(re.split("[:@]", name, maxsplit=1)[0]) and not _FILE.search(name)
    return bool(may_be_id or os.path.exists(path) or (has_magic(name) and glob(name, recursive=True)))
