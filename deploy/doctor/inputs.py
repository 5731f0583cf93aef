"""Checks of what a run begins with: required settings, the model's folder, files of questions."""

import re
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.text import HUB_ID
from penstock.deploy.doctor.finding import Finding

_FILE = re.compile(r"\.((jsonl|ndjson|json|csv|tsv)(\.gz)?|parquet|arrow)(?![\w-])", re.IGNORECASE)


def check_inputs(learner: LearnerSettings) -> Iterator[Finding]:
    """Yield an error per required setting that is empty, and for an absent model or data set."""
    model, faults = learner.model, []
    if model and Path(model).is_dir():
        names = ("config.json", "tokenizer.json", "*.safetensors")
        lacking = [name for name in names if not any(Path(model).glob(name))]
        faults = [f"LEARNER_MODEL={model}: no {name} is there" for name in lacking]
    elif not HUB_ID.fullmatch(model):
        faults = [f"LEARNER_MODEL={model}: no such folder" if model else "LEARNER_MODEL is not set"]
    if not (learner.dataset or learner.evaluate_only):
        faults.append("LEARNER_DATASET is not set")
    for variable in ("dataset", "eval_dataset"):
        absent = [name for name in getattr(learner, variable) if not _may_exist(name)]
        faults += [f"LEARNER_{variable.upper()}={name}: no such file or folder" for name in absent]
    why, remedy = "the learner refuses to start", "do: name what is there, or copy it there"
    yield from (Finding("inputs", "error", fault, why, remedy) for fault in faults)


def _may_exist(source: str) -> bool:
    """Return whether the data set NAME[#COUNT] is on this machine, or may be an id of the hub."""
    name = source.rpartition("#")[0] or source
    may_be_id = HUB_ID.fullmatch(re.split("[:@]", name, maxsplit=1)[0]) and not _FILE.search(name)
    return bool(may_be_id or Path(name).exists() or (has_magic(name) and glob(name, recursive=True)))
