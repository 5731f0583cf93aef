"""Checks of what a run begins with: required settings, the model's folder, files of data and code."""

import os
import re
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.files.reading import DAMAGE, absence, parse_json
from penstock.common.text import HUB_ID
from penstock.deploy.doctor.finding import Finding

REMEDY = "name what is there, or copy it there"
_FILE = re.compile(r"\.((jsonl|ndjson|json|csv|tsv)(\.gz)?|parquet|arrow|py)(?![\w-])", re.IGNORECASE)


def check_inputs(learner: LearnerSettings) -> Iterator[Finding]:
    """Yield an error per required setting that is empty, and for absent models, data sets and code."""
    model, faults = learner.model, []
    if os.path.isdir(model):
        names = ("config.json", "tokenizer.json", "*.safetensors")
        lacking = [name for name in names if not any(Path(model).glob(name))]
        faults = [f"LEARNER_MODEL={model}: no {name} is there" for name in lacking]
    elif not model or not HUB_ID.fullmatch(model) or os.path.islink(model):
        faults = [f"LEARNER_MODEL={model}: {absence(model)}" if model else "LEARNER_MODEL is not set"]
    if not (learner.dataset or learner.evaluate_only):
        faults.append("LEARNER_DATASET is not set")
    for variable in ("dataset", "eval_dataset", "rewards", "tools", "environment", "agent", "loss"):
        asked = getattr(learner, variable)
        given = [asked] if isinstance(asked, str) else asked
        absent = [name for name in given if name and not _may_exist(name)]
        faults += [f"LEARNER_{variable.upper()}={name}: {absence(name)}" for name in absent]
    why = "the learner refuses to start"
    yield from (Finding("inputs", "error", fault, why, f"do: {REMEDY}") for fault in faults)
    wanted, limit = learner.max_prompt_length + learner.max_completion_length, _longest(model)
    if limit and wanted > limit:
        both = "LEARNER_MAX_PROMPT_LENGTH and LEARNER_MAX_COMPLETION_LENGTH"
        fault = f"{both}: {wanted} tokens together, but LEARNER_MODEL={model} takes {limit}"
        yield Finding("inputs", "error", fault, why, f"set: {both} to at most {limit} together")


def _longest(model: str) -> int:
    """Return the most tokens that a model folder's config.json allows; 0 if it does not say."""
    try:
        config = parse_json((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["max_position_embeddings"])
    except (OSError, *DAMAGE):
        return 0


def _may_exist(source: str) -> bool:
    """Return whether NAME[#COUNT], or the file of FILE.py:NAME, is here, or may be elsewhere."""
    name = source.rpartition("#")[0] or source
    path = re.split(r"(?<=\.py):", name)[0]
    may_be_id = HUB_ID.fullmatch(re.split("[:@]", name, maxsplit=1)[0]) and not _FILE.search(name)
    return bool(may_be_id or os.path.exists(path) or (has_magic(name) and glob(name, recursive=True)))
