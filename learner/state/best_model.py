"""The best model by the answers to held-out questions, kept beside the checkpoints."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TypedDict, cast

from penstock.common.files.atomic import write_whole
from penstock.common.files.reading import parse_json, reading
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.wire.codec import fields_as
from penstock.common.wire.ids import Version
from penstock.common.wire.messages import ADAPTER_FILE, DELTA_FILE
from penstock.learner.state.versions import MODEL


class BestModel(TypedDict):
    """The content of best.json: which version was the best, by which metric."""

    step: int
    version: str
    metric: str
    value: float
    answered: int  # of the held-out questions


def read_best(run_folder: RunFolder) -> BestModel | None:
    """Return the best.json of the largest step in best/, or None. Raise ConfigError if it is damaged."""
    notes = sorted(run_folder.best.glob("[0-9]*/best.json"))
    if not notes:
        return None
    with reading(notes[-1], f"Delete {notes[-1].parent}"):
        return cast(BestModel, fields_as(BestModel, parse_json(notes[-1].read_bytes()), "best.json"))


def keep_if_best(
    folder: LearnerFolder, version: Version, metric: str, value: float, answered: int
) -> bool:
    """Copy a version's model to best/ if it is the best so far, and delete the models kept there before.

    Return whether it was copied; if not, nothing is changed. The copied model, to which the link
    best/model leads, is the folder of `version` in versions/, or the merged model in it, by hard links
    where possible. Best is a larger `value` of `metric` with no fewer `answered` held-out questions than
    the model in best/ (fewer may be the easier). Any value is best if best/ holds no model, or one
    chosen by another metric. Raise RunTaken if a later learner has claimed the folder, DiskFull if the
    disk stays full, ConfigError if best.json is damaged, OSError if the version's folder is missing.
    """
    best = read_best(folder)
    if best is not None and best["metric"] == metric:
        better = value > best["value"] and answered >= best["answered"]
        if not better:
            return False
    score = {"metric": metric, "value": value, "answered": answered}
    note = json.dumps({"step": version.step, "version": str(version)} | score)

    def copy(aside: Path) -> None:
        """Put the model of `version` (links or copies) and best.json into the folder `aside`.

        Raise OSError if that fails, for example without the version's folder.
        """
        weights = folder.version(version.incarnation, version.step)
        model = weights / MODEL if (weights / ADAPTER_FILE).exists() else weights
        without = shutil.ignore_patterns(DELTA_FILE)
        shutil.copytree(model, aside / "model", copy_function=link_or_copy, ignore=without)
        write_whole(aside / "best.json", note.encode())

    path = folder.best_model(version.step)
    folder.write_folder("the best model", path, copy)
    with suppress(OSError):  # a link for people; some file systems have none
        folder.link(folder.best_link, path / "model")
    earlier = [old for old in folder.best.glob("[0-9]*") if old != path]
    folder.check_not_superseded()  # after the listing: a better model of the successor is not in it
    for old in earlier:
        shutil.rmtree(old)
    return True


def link_or_copy(source: str, target: str) -> str:
    """Make a hard link to the file `source` at `target`, or a copy if that fails. Return `target`.

    A link fails across file systems, for example, or if `target` is there: the copy then replaces it.
    Raise OSError if the copy fails too.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
