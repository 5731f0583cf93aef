"""run.json: what a start of the learner was made of, and what the next start has otherwise.

A resumed run goes on from its own weights and its own place in the data. With another model, tokenizer
or data set it would silently be neither the old run nor a new one, so it is refused.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.files.hashing import hash_file, new_digest
from penstock.common.files.lock import holder_name
from penstock.common.files.reading import parse_json, reading
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.log import get_logger
from penstock.common.text import one_line, short
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.data.files import kind_of, matching_files
from penstock.learner.data.plan import Plan
from penstock.learner.data.sources import Source
from penstock.learner.state.fingerprint import this_machine

log = get_logger(__name__)

REFUSED = {
    "model": "the run goes on from the weights of its own checkpoint, not from those of this model, of "
    "which only a reference (LEARNER_BETA) and the base of LoRA's adapters would be",
    "tokenizer": "token ids that the model has learned would mean something else",
    "dataset": "the run goes on at its place in the questions, which would be other ones",
}
"""What a resume refuses to find changed, each with what going on would mean."""

_PACKAGES = ("penstock", "torch", "transformers", "deepspeed", "redis")
_WHOLE, _SAMPLE, _SAMPLES = 1 << 30, 1 << 20, 16
_UNCOMPARED = {"resume", "accept_changed"}


def describe_start(settings: LearnerSettings, plan: Plan) -> dict[str, Any]:
    """Return what this start is made of, as plain data. Raise DataError or OSError for unreadable files.

    A data set of a hub is known by its name alone.
    """
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "by": holder_name(),
        "versions": _versions(),
        "commit": _commit(),
        "machine": this_machine(),
        "model": {"name": settings.model, "hash": _hash_files(plan.model_folder.glob("*.safetensors"))},
        "tokenizer": {"name": settings.model, "hash": plan.contract.tokenizer_hash},
        "dataset": _describe_data(settings.dataset, settings.dataset_split),
        "eval_dataset": _describe_data(settings.eval_dataset, settings.eval_split),
        "rewards": {one.name: _digest_of(one) for one in plan.contract.rewards}
        | {code.name: code.digest for code in plan.contract.episodes.codes},
        "settings": settings.model_dump(mode="json"),
    }


def _digest_of(spec: RewardSpec) -> str:
    """Return the hash of a reward's code, or of a judge's or hub model's options; "" for a built-in."""
    return spec.digest or (blake3(str(spec.options).encode()).hexdigest() if spec.kind else "")


def check_same_run(
    folder: RunFolder, now: Mapping[str, Any], settings: LearnerSettings, begun: bool
) -> None:
    """Compare this start with the one that the run's folder tells of, and log what differs.

    `begun` says whether the run has a batch or an evaluation. Raise ConfigError if its model, tokenizer
    or data set is another one and LEARNER_ACCEPT_CHANGED does not name it, for a damaged run.json, for
    LEARNER_RESUME=new or a path, and, with LEARNER_RESUME=must, if there is nothing to resume.
    """
    if settings.resume not in ("auto", "must"):
        raise ConfigError(
            f"LEARNER_RESUME={settings.resume} is for `penstock up`, which moves an old run's folder "
            "away before it starts the queue server: choose another RUN_NAME for a learner that is "
            "started without it"
        )
    if not begun:
        if settings.resume == "must":
            raise ConfigError(
                f"LEARNER_RESUME=must: {folder.path} has no run with a step to resume. Correct RUN_NAME "
                "or RUN_DIR, or start a new run with LEARNER_RESUME=auto"
            )
        return
    if not folder.record.is_file():  # of an earlier release
        return
    with reading(folder.record, "Delete the file to go on without this comparison"):
        before: Any = parse_json(folder.record.read_bytes())
        if before["settings"].get("evaluate_only"):  # nothing was trained, so nothing goes on
            return
        changed = [name for name in REFUSED if before[name]["hash"] != now[name]["hash"]]
        reported = [
            *_changed_evaluation(before, now),
            *_changed_rewards(before, now),
            *_changed_settings(before, now),
        ]
        explained = {name: _explain(name, before, now) for name in changed}
    for line in reported:
        log.warning(f"Changed since the last start: {line}.")
    refused = [name for name in changed if name not in settings.accept_changed]
    for name in set(changed) - set(refused):
        log.warning(f"Another {name} than at the last start, as accepted: {REFUSED[name]}.")
    if refused:
        raise ConfigError(
            f"the run in {folder.path} was started with another "
            + "; ".join(explained[name] for name in refused)
            + ". Choose another RUN_NAME for a new run (or LEARNER_RESUME=new with `penstock up`), set "
            f"the old one, or go on all the same with LEARNER_ACCEPT_CHANGED={','.join(refused)}"
        )


def check_next_start(folder: RunFolder, settings: LearnerSettings, plan: Plan) -> None:
    """Compare the next start with the last one in the run's folder, if this has a checkpoint.

    Do nothing for settings that only evaluate or that let `penstock up` move the run away. Raise
    ConfigError as `check_same_run`, DataError or OSError for unreadable files.
    """
    if not settings.evaluate_only and settings.resume in ("auto", "must"):
        begun = any(folder.checkpoints.glob("[0-9]*"))
        check_same_run(folder, describe_start(settings, plan) if begun else {}, settings, begun)


def write_start(
    folder: LearnerFolder, start: Mapping[str, Any], origins: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write run.json and settings.env, which tell of this start. Raise DiskFull, RunTaken, OSError.

    `origins` says by variable where its value comes from, as "flag".
    """
    folder.write_file(folder.record, json.dumps(start, indent=1, ensure_ascii=False).encode())
    folder.write_file(folder.settings, _as_variables(start["settings"], origins).encode())


def _explain(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return `name` with what it was and is, and what going on would mean."""
    old, new = before[name], now[name]
    if old["name"] == new["name"]:
        hashes = f"hash {old['hash'][:12]} then, {new['hash'][:12]} now"
        found = f"{short(new['name'])} has another content: {hashes}"
    else:
        found = f"{short(str(old['name']))} then, {short(new['name'])} now"
    return f"{name} ({found}; {REFUSED[name]})"


def _changed_evaluation(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if both starts have held-out questions of their own, and these differ."""
    old, new = before.get("eval_dataset", {"name": ""}), now["eval_dataset"]  # {}: an earlier release
    if old["name"] and new["name"] and old["hash"] != new["hash"]:
        yield (
            f"the held-out questions of LEARNER_EVAL_DATASET ({short(new['name'])}); evaluations before "
            "and after cannot be compared"
        )


def _changed_rewards(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each reward, tool, environment or agent of both starts, with other code."""
    for name, code in now["rewards"].items():
        if name in before["rewards"] and before["rewards"][name] != code:
            yield f"the code or options of {name}; they hold for the groups that come from now on"


def _changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each setting that differs."""
    for name, value in now["settings"].items():
        if name not in _UNCOMPARED and name in before["settings"] and before["settings"][name] != value:
            yield f"LEARNER_{name.upper()} was {_shown(before['settings'][name])} and is {_shown(value)}"


def _shown(value: Any) -> str:
    """Return a setting's value as a variable would have it."""
    return short(_as_text(value)) or "empty"


def _as_text(value: Any) -> str:
    """Return a setting's value in the form that its variable has."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_variables(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return settings as lines for --env-file, with `origins`; those at their default are comments."""
    default = LearnerSettings().model_dump(mode="json")
    lines = ["# The learner's settings at its last start. A line that begins with # has the default."]
    for name, value in values.items():
        if name in _UNCOMPARED:  # what a start asks for once
            continue
        mark, text = "# " if default[name] == value else "", _as_text(value)
        if text.startswith("${"):  # which --env-file refuses
            mark = "# set this one yourself: "
        if not re.fullmatch(r"[\w@%+=:,./~-]*", text):
            escaped = text.replace("\\", "\\\\").replace("'", "\\'")
            text = f"'{escaped}'"
        variable = f"LEARNER_{name.upper()}"
        origin = f"  # {one_line(origins[variable])}" if variable in origins and not mark else ""
        lines.append(f"{mark}{variable}={text}{origin}" if not mark or "\n" not in text else "")
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    """Return the versions of the packages that matter, "" for one that is not installed."""
    found = {}
    for name in _PACKAGES:
        found[name] = ""
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str:
    """Return the commit of the working directory's git repository; "" without one, or without git."""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return ""


def _describe_data(names: Sequence[str], split: str) -> dict[str, str]:
    """Return the `names` of data sets as a text, and their hash: of files, else of name and `split`."""
    digest = new_digest()
    for source in map(Source.parse, names):
        path = source.path
        named = f"{source.name} {source.config} {source.revision} {split}"
        digest.update(f"{'' if path else named} {source.count}".encode())
        if path and path.is_dir():  # a saved one; what is hidden or cached, and a README, is no row
            found = [one for one in path.rglob("*") if kind_of(one) and not one.match("cache-*")]
            hidden = [one for one in found if "/." in f"/{one.relative_to(path).as_posix()}"]
            digest.update(_hash_files(set(found) - set(hidden)).encode())
        elif path:
            digest.update(_hash_files(matching_files(path)).encode())
    return {"name": ",".join(names), "hash": digest.hexdigest()}


def _hash_files(paths: Iterable[Path]) -> str:
    """Return a hash of files' content, by name; of one over 1 GiB its size and 16 MiB spread over it."""
    digest = new_digest()
    for path in sorted(one for one in paths if one.is_file()):
        size = path.stat().st_size
        if size <= _WHOLE:
            digest.update(hash_file(path).encode())
            continue
        digest.update(f"{size}".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
