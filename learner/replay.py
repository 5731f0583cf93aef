"""`python -m learner.replay RUN_FOLDER`: train a run again from its journal alone.

No queue server, no actors, no rewarders: the groups lie in the journal, in the order in which they
were trained, so the same functions make the same Updates. Says how far the weights are from those of
the run's last checkpoint: nothing at all on the CPU with as many threads and ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError, PenstockError
from common.learner_settings import LearnerSettings
from common.log import configure_logs
from learner.claim import Claim, read_chain, read_claims
from learner.deepspeed_engine import join_process_group
from learner.journal import segment_path, valid_length
from learner.ledger import Ledger
from learner.plan import resolve_model
from learner.policy import Policy
from learner.record import Recorder
from learner.resume import relive


def replay(folder: Path, out: Path) -> dict[str, Any]:
    """Retrain the run in `folder` from its first record; model and metrics go to `out`.

    Returns `steps`, and `difference`: the largest absolute difference to a weight of the last
    checkpoint, None if there is no checkpoint of that step. Raises ConfigError without a journal.
    """
    claim = _after(folder)
    header = next((record for _, record in read_chain(folder, claim)), None)
    if header is None or header["kind"] != "header":
        raise ConfigError(f"{folder}: no journal of a run there; expected journal/000001.journal")
    settings = LearnerSettings(**header["settings"])
    steps = max(
        (record["step"] for _, record in read_chain(folder, claim) if "step" in record), default=0
    )
    out.mkdir(parents=True, exist_ok=True)
    join_process_group()
    policy = Policy(resolve_model(settings.model), settings, header["steps"])
    try:
        past = relive(folder, claim, policy, Ledger(), Recorder(out, [], "replay"), None)
        policy.export(out / "model")
    finally:
        policy.close()
    found = sorted((folder / "checkpoints").glob(f"[0-9]*-{steps:08d}"))
    difference = _difference(found[-1] / "model", out / "model") if found else None
    return {"steps": past.step, "difference": difference}


def _after(folder: Path) -> Claim:
    """The claim of a learner that would go on where the run stands."""
    newest = max(read_claims(folder), default=0)
    length = valid_length(segment_path(folder, newest)) if newest else 0
    return Claim(newest + 1, newest, length, "replay")


def _difference(one: Path, other: Path) -> float:
    ours, theirs = _weights(one), _weights(other)
    if ours.keys() != theirs.keys():
        raise ConfigError(f"{one} and {other} hold different tensors")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _weights(folder: Path) -> Mapping[str, Tensor]:
    files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file.get_tensor(name).float() for file in files for name in file.keys()}  # noqa: SIM118


def main() -> int:
    """Replay and print the comparison as JSON."""
    parser = argparse.ArgumentParser(prog="python -m learner.replay", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, help="where model and metrics go (default: FOLDER/replay)")
    options = parser.parse_args()
    configure_logs("replay", "text")
    try:
        print(json.dumps(replay(options.folder, options.out or options.folder / "replay")))
    except PenstockError as error:
        print(f"replay: {type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
