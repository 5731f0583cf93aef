"""`penstock replay RUN_FOLDER`: train a run again from its journal alone.

No queue server, no actors, no rewarders: the groups lie in the journal, in the order in which they
were trained, so the same functions make the same Updates. On the CPU the weights are those of the run
bit for bit, those of a run on several ranks to rounding. With other settings it is an A/B on the same
data.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.common.config.command import mistake
from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Claim, read_chain, read_claims
from penstock.common.journal.segments import explain_gap, left_out, valid_length
from penstock.common.log import configure_logs, get_logger
from penstock.learner.policy.deepspeed_engine import join_process_group
from penstock.learner.policy.policy import Policy
from penstock.learner.policy.processes import world_size
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import retrain_tail
from penstock.learner.state.ledger import Ledger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay compares with its run."""

    steps: int
    weights_difference: float | None
    """Largest absolute difference to a weight of the last checkpoint; None if it is of another step."""
    steps_with_other_metrics: list[int]
    """Steps of which a metric differs, times and rates left aside."""


def replay(folder: Path, out: Path, changes: Mapping[str, str]) -> Replayed:
    """Retrain the run in `folder` from its first record; model and metrics go to `out`.

    `changes` are settings to change, by name without prefix. Raises ConfigError without a journal.
    """
    if world_size() > 1:
        raise ConfigError("a replay is one process: start it without torchrun")
    run_folder, out_folder = RunFolder(folder), LearnerFolder(out.resolve(), 0)
    if out_folder.claims.exists() or out_folder.journal.exists():
        raise ConfigError(f"--out {out}: a run's own files would be overwritten; name another folder")
    claim = _after(run_folder)
    headers = [record for _, record in read_chain(run_folder, claim) if record["kind"] == "header"]
    if not headers:
        raise ConfigError(f"{folder}: no journal of a run there; expected journal/*.journal and claims/")
    header = headers[0]
    settings = _settings(header["settings"], changes)
    if any(later["settings"] != header["settings"] for later in headers):
        log.warning("the run's settings changed when it was resumed; it is replayed with the first ones")
    torch.set_num_threads(header["machine"]["threads"])  # the order of sums depends on it
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}; name another") from error
    join_process_group()
    policy = Policy(Path(header["model_folder"]), settings, header["steps"])
    try:
        recorder = Recorder(out_folder, [], "replay")
        past = retrain_tail(run_folder, claim, policy, Ledger(), recorder, None, changes)
        policy.export(out / "model")
    finally:
        policy.close()
    found = sorted(run_folder.checkpoints.glob(f"[0-9]*-{past.step:08d}"))
    return Replayed(
        past.step,
        _difference(found[-1] / "model", out / "model") if found else None,
        _other_metrics(run_folder.metrics, out_folder.metrics),
    )


def _settings(recorded: Mapping[str, Any], changes: Mapping[str, str]) -> LearnerSettings:
    try:
        return LearnerSettings(**{**recorded, **changes})
    except ValidationError as error:
        mistakes = "\n".join(mistake(detail, ("LEARNER", *detail["loc"])) for detail in error.errors())
        raise ConfigError(f"these settings cannot be replayed: {mistakes}") from error


def _after(run_folder: RunFolder) -> Claim:
    """The claim of a learner that would go on where the run stands; raises ConfigError."""
    newest = max(read_claims(run_folder), default=0)
    length = valid_length(run_folder, newest)
    rest = left_out(run_folder, newest, length)
    if rest is not None and not rest.torn:
        raise ConfigError(explain_gap(run_folder, newest, length, length + rest.length))
    return Claim(newest + 1, newest, length, "replay")


def _difference(one: Path, other: Path) -> float:
    ours, theirs = _weights(one), _weights(other)
    if ours.keys() != theirs.keys():
        raise ConfigError(f"{one} and {other} hold different tensors")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _weights(folder: Path) -> dict[str, Tensor]:
    path = folder / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); the replay is whole, but has nothing to compare with"
        ) from error


def _other_metrics(one: Path, other: Path) -> list[int]:
    ours, theirs = dict(_metrics(one)), dict(_metrics(other))
    return sorted(step for step in ours.keys() | theirs.keys() if ours.get(step) != theirs.get(step))


def _metrics(path: Path) -> Iterator[tuple[int, str]]:
    """Step and metrics, as text: NaN differs from itself."""
    for found in read_json_lines(path):
        row = {name: value for name, value in found.items() if not name.startswith("perf/")}
        yield row["step"], json.dumps(row, sort_keys=True)


def main(folder: str, out: str, changes: str) -> int:
    """Replay for `penstock replay` and print the comparison as a line of JSON; return the exit code.

    `changes` is JSON: settings to change, by name without prefix.
    """
    configure_logs("replay", "text")
    try:
        found = replay(Path(folder), Path(out), json.loads(changes))
    except PenstockError as error:
        print(f"replay: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
