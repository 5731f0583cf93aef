"""Checks of what a run begins with: required settings, the model's folder, files of questions and code."""

import re
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.own_code import split_source
from penstock.deploy.doctor.finding import Finding

REMEDY = "name what is there, or copy it there"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CODE = ("rewards", "tools", "environment", "agent", "loss")
_FILE = re.compile(r"\.((jsonl|ndjson|json|csv|tsv)(\.gz)?|parquet|arrow)(?![\w-])", re.IGNORECASE)


def check_inputs(learner: LearnerSettings) -> Iterator[Finding]:
    """Yield an error per required setting that is empty, and for absent models, data sets and code."""
    model, faults = learner.model, []
    if model and Path(model).is_dir():
        names = ("config.json", "tokenizer.json", "*.safetensors")
        lacking = [name for name in names if not any(Path(model).glob(name))]
        faults = [f"LEARNER_MODEL={model}: no {name} is there" for name in lacking]
    elif not _HUB_ID.fullmatch(model):
        faults = [f"LEARNER_MODEL={model}: no such folder" if model else "LEARNER_MODEL is not set"]
    if not (learner.dataset or learner.evaluate_only):
        faults.append("LEARNER_DATASET is not set")
    for variable in ("dataset", "eval_dataset", *_CODE):
        value = getattr(learner, variable)
        may_exist = _code_may_exist if variable in _CODE else _may_exist
        absent = [name for name in ([value] if isinstance(value, str) else value) if not may_exist(name)]
        faults += [f"LEARNER_{variable.upper()}={name}: no such file or folder" for name in absent]
    why = "the learner refuses to start"
    yield from (Finding("inputs", "error", fault, why, f"do: {REMEDY}") for fault in faults)


def _code_may_exist(asked: str) -> bool:
    """Return whether the file of FILE.py:NAME is on this machine, or another form names the code."""
    source = split_source(asked)[0]
    return not source.endswith(".py") or Path(source).is_file()


def _may_exist(source: str) -> bool:
    """Return whether the data set NAME[#COUNT] is on this machine, or may be an id of the hub."""
    name = source.rpartition("#")[0] or source
    may_be_id = _HUB_ID.fullmatch(re.split("[:@]", name, maxsplit=1)[0]) and not _FILE.search(name)
    return bool(may_be_id or Path(name).exists() or (has_magic(name) and glob(name, recursive=True)))
