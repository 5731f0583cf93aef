"""Checks of what a run begins with: required settings, the model's folder, files of questions."""

import re
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from penstock.common.config.learner_settings import LearnerSettings
from penstock.deploy.doctor.finding import Finding

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILE = re.compile(r"\.((jsonl|ndjson|json|csv|tsv)(\.gz)?|parquet|arrow)", re.IGNORECASE)
_MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors")


def check_inputs(learner: LearnerSettings) -> Iterator[Finding]:
    """Yield an error per required setting that is empty, and for an absent model or data set.

    No file is read. What may be an id of the hub is not looked up.
    """
    if not learner.model:
        yield _error("LEARNER_MODEL is not set", "LEARNER_MODEL=FOLDER or a hub id")
    elif Path(learner.model).is_dir():
        for name in _MODEL_FILES:
            if not any(Path(learner.model).glob(name)):
                yield _error(f"LEARNER_MODEL={learner.model}: no {name} is there", "a complete folder")
    elif not _HUB_ID.fullmatch(learner.model):
        yield _error(f"LEARNER_MODEL={learner.model}: no such folder is there", "the model's folder")
    if not (learner.dataset or learner.evaluate_only):
        yield _error("LEARNER_DATASET is not set", "LEARNER_DATASET=FILE, a folder or a hub id")
    for variable in ("dataset", "eval_dataset"):
        for name in getattr(learner, variable):
            if not _may_exist(name.rpartition("#")[0] or name):
                found = f"LEARNER_{variable.upper()}={name}: no such file or folder is there"
                yield _error(found, "the file, or copy it there")


def _error(found: str, expected: str) -> Finding:
    """Return the error that an input is missing; `expected` is what to name."""
    return Finding("inputs", "error", found, "the learner refuses to start", f"do: name {expected}")


def _may_exist(name: str) -> bool:
    """Return whether a data set of this name is on this machine, or may be an id of the hub."""
    if Path(name).exists() or (has_magic(name) and glob(name, recursive=True)):
        return True
    hub_id = re.split("[:@]", name, maxsplit=1)[0]
    return bool(_HUB_ID.fullmatch(hub_id)) and not _FILE.search(name)
