"""`penstock replay RUN_FOLDER`: train a run again from its journal alone, without a queue server.

The journal holds the groups in the order in which they were trained, so the same functions make the same
Updates. On the CPU the weights equal the run's weights bit for bit; after a run on several ranks they
differ by rounding. With other settings a replay is an A/B test on the same data.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.common.config.command import build, print_error
from penstock.common.config.role_command import RunCommand
from penstock.common.errors import ConfigError, PenstockError
from penstock.common.files.atomic import make_folder, read_json_lines
from penstock.common.files.modes import share, umask
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import next_claim, read_chain
from penstock.common.log import configure_logs, get_logger
from penstock.learner.policy.deepspeed_engine import join_process_group
from penstock.learner.policy.policy import Policy
from penstock.learner.policy.processes import world_size
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import retrain_tail, settings_of
from penstock.learner.state.ledger import Ledger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The comparison of a replay with its run."""

    steps: int
    weights_difference: float | None  # largest absolute one; None without a checkpoint of the last step
    steps_with_other_metrics: list[int]  # or with metrics in one file only; times and rates aside


def replay(folder: Path, out: Path, changes: Mapping[str, str]) -> Replayed:
    """Train the run in `folder` again from its first record, and return a comparison with the run.

    `out`, created if need be, gets the model, metrics.jsonl and completions. The comparison has the
    number of steps, the largest difference of the weights to the checkpoint of the last step (None
    without one), and the steps whose metrics differ. `changes` are settings to change, by name without
    prefix, such as {"epsilon": "0.3"}. If the run's settings changed at a resume, log a warning and use
    the first ones. Raise ConfigError if the journal is missing, damaged, trimmed or of another
    release, if a setting or the model folder is wrong, if `out` is a run's folder, under torchrun, or,
    after the replay, if the models cannot be compared. Raise NotFinite if the replayed weights hold NaN
    or infinity, or DiskFull. Torch gets as many threads as the run had.
    """
    if world_size() > 1:
        found = f"a replay was started as {world_size()} processes, expected 1"
        raise ConfigError(f"{found}: start it without torchrun")
    run_folder, out_folder = RunFolder(folder), LearnerFolder(out.resolve(), 0)
    if out_folder.claims.exists() or out_folder.journal.exists():
        found = "this is the folder of a run, and a run's own files would be overwritten"
        raise ConfigError(f"--out {out}: {found}; name another folder")
    claim = next_claim(run_folder, run_folder.newest_incarnation() + 1, "replay")
    headers = [record for _, record in read_chain(run_folder, claim) if record["kind"] == "header"]
    if not headers:
        expected = "expected journal/*.journal and claims/: name the folder of a run"
        raise ConfigError(f"{folder}: no journal of a run there; {expected}")
    header = headers[0]
    settings = settings_of(header["settings"], changes)
    if any(later["settings"] != header["settings"] for later in headers):
        log.warning("The run's settings changed at a resume: the replay uses the first settings.")
    torch.set_num_threads(header["machine"]["threads"])  # the order of sums depends on it
    make_folder(out, "--out")
    join_process_group()
    policy = Policy(Path(header["model_folder"]), settings, header["steps"])
    try:
        recorder = Recorder(out_folder, [], "replay")
        past = retrain_tail(run_folder, claim, policy, Ledger(), recorder, None, changes)
        policy.export(out / "model")
        share(out / "model")
    finally:
        policy.close()
    saved = sorted(run_folder.checkpoints.glob(f"[0-9]*-{past.step:08d}"))
    difference = _difference(saved[-1] / "model", out / "model") if saved else None
    others = {step for step, _ in set(_metrics(run_folder.metrics)) ^ set(_metrics(out_folder.metrics))}
    return Replayed(past.step, difference, sorted(others))


def _difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference between the weights of two model folders.

    Raise ConfigError if a file of weights cannot be read, or if names or shapes of the tensors differ.
    """
    ours, theirs = _weights(one), _weights(other)
    shapes = [{name: tensor.shape for name, tensor in found.items()} for found in (ours, theirs)]
    if shapes[0] != shapes[1]:
        found = f"the replay was made, but {one} and {other} hold different tensors"
        raise ConfigError(f"{found}: restore the model folder and the packages that the run had")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a folder's model*.safetensors as float32, by the tensors' names.

    Raise ConfigError if a file cannot be read.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")) or [folder / "model.safetensors"]:
        found |= _tensors(path)
    return found


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors as float32, by name. Raise ConfigError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        result = "the replay was made; restore the file to compare"
        raise ConfigError(f"{path}: cannot be read ({error}); {result}") from error


def _metrics(path: Path) -> Iterator[tuple[int, str]]:
    """Yield pairs for each row of the file metrics.jsonl at `path`: the step, and the metrics as JSON.

    Times and rates (perf/..) are left out, and names are sorted. A missing file yields nothing.
    Damaged rows are logged and left out.
    """
    for found in read_json_lines(path):
        row = {name: value for name, value in found.items() if not name.startswith("perf/")}
        yield row["step"], json.dumps(row, sort_keys=True)  # as text: NaN is unequal to itself


def main(folder: str, out: str, changes: str) -> int:
    """Train a run's journal again for `penstock replay`, with other settings; return the exit code.

    `folder` is the run's, `out` a new one for what the replay writes. `changes` is a JSON object of
    settings to change, by name without prefix. The comparison is printed on standard output as a line of
    JSON, and the code is 0. A PenstockError is printed on standard error, and its exit code is returned.
    Raise ValueError if `changes` is not JSON.
    """
    configure_logs("replay", "text")
    try:
        with umask(build(RunCommand, {}).run.umask):
            found = replay(Path(folder), Path(out), json.loads(changes))
    except PenstockError as error:
        print_error("replay", error)
        return error.exit_code
    print(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
