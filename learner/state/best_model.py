"""The best model so far by held-out questions, kept beside the checkpoints."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from penstock.common.files.atomic import folder_size, whole_folder, write_whole
from penstock.common.files.disk import Disk
from penstock.common.files.run_folder import RunFolder
from penstock.common.wire.ids import Version
from penstock.learner.state.incarnations import check_not_superseded


def read_best(run_folder: RunFolder) -> dict[str, Any] | None:
    """Step, version, metric and value of the best model; None if there is none."""
    notes = sorted(run_folder.best.glob("[0-9]*/best.json"))
    return json.loads(notes[-1].read_text()) if notes else None


def keep_if_best(
    run_folder: RunFolder,
    model: Path,
    version: Version,
    metric: str,
    value: float,
    answered: int,
    disk: Disk,
) -> bool:
    """Keep the model of a version if no earlier one was as good; says whether it is kept.

    One with fewer questions `answered` than the best so far is not compared with it: those that are
    left may be the easier ones.
    """
    best = read_best(run_folder)
    if best is not None and best["metric"] == metric:
        better = value > best["value"] and answered >= best.get("answered", 0)
        if not better:
            return False
    folder = run_folder.best_model(version.step)
    check_not_superseded(run_folder, version.incarnation)
    if folder.exists():  # the same step of an earlier lineage
        shutil.rmtree(folder)
    note = {
        "step": version.step, "version": str(version), "metric": metric, "value": value,
        "answered": answered,
    }  # fmt: skip
    disk.write("the best model", folder, lambda: _copy(model, folder, note), folder_size(model))
    earlier = [old for old in run_folder.best.glob("[0-9]*") if old != folder]
    check_not_superseded(run_folder, version.incarnation)  # or a better one of the successor's is there
    for old in earlier:
        shutil.rmtree(old)
    return True


def _copy(model: Path, folder: Path, note: dict[str, Any]) -> None:
    with whole_folder(folder) as aside:
        shutil.copytree(model, aside / "model", copy_function=_link)
        write_whole(aside / "best.json", json.dumps(note).encode())


def _link(source: str, target: str) -> str:
    """A second name for the same bytes, which are never changed; a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
