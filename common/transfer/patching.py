"""Weights made on this host of an earlier version, so that only what changed is fetched."""

import re
from collections.abc import Sequence
from pathlib import Path

from penstock.common.files.run_folder import version_name
from penstock.common.log import get_logger
from penstock.common.transfer.download import FetchFailed, Source, Wanted, alone, download
from penstock.common.wire.messages import DELTA_FILE, Delta, Weights

HASH = re.compile("[0-9a-f]{64}")

log = get_logger(__name__)


def patch(source: Source, weights: Weights, folder: Path) -> bool:
    """Make the file of announced weights of an earlier version; return whether it is there now.

    `folder` has the fetched versions, each in versions/HASH, and gets the deltas. False: no version is
    there that the announced deltas begin with, they have as many bytes as the whole file, or one could
    not be used, which is logged; the whole file is fetched then. Block meanwhile.
    """
    versions = folder / "versions"
    if not (deltas := _usable(weights, versions)):
        return False
    base, target = (versions / of / weights.file for of in (deltas[0].parent, weights.hash))
    try:
        with alone(target.parent):
            return not target.exists() and _apply(source, weights, deltas, base, target)
    except (FetchFailed, OSError) as error:
        log.info(f"Version {weights.version} is fetched whole: {error}.")
        return False


def _usable(weights: Weights, versions: Path) -> Sequence[Delta]:
    """Return the fewest announced deltas that begin with a version that is here, () if too large."""
    for first in range(len(weights.deltas) - 1, -1, -1):
        deltas = weights.deltas[first:]
        if sum(one.size for one in deltas) >= weights.size:
            break
        if not all(HASH.fullmatch(digest) for digest in (deltas[0].parent, deltas[0].hash)):
            break
        if (versions / deltas[0].parent / weights.file).is_file():
            return deltas
    return ()


def _apply(source: Source, weights: Weights, deltas: Sequence[Delta], base: Path, target: Path) -> bool:
    """Fetch the deltas, make the file `target` of the file `base`; return whether it is the right one.

    Raise FetchFailed if a delta cannot be fetched, OSError if a file cannot be read or written.
    """
    from penstock.common.transfer.delta import BadDelta, apply_deltas

    files = [target.parents[2] / "deltas" / delta.hash / DELTA_FILE for delta in deltas]
    for delta, file in zip(deltas, files, strict=True):
        path = f"versions/{version_name(delta.version.incarnation, delta.version.step)}/{DELTA_FILE}"
        download(source, Wanted(path, delta.size, delta.hash), file)
    aside = target.with_name(f".{target.name}.patched")
    try:
        fault = "" if apply_deltas(base, files, aside) == weights.hash else "they make another file"
    except BadDelta as error:
        fault = str(error)
    if fault:
        aside.unlink()
        log.warning(
            f"The deltas to version {weights.version} cannot be used, {fault}: fetching it whole."
        )
        return False
    aside.replace(target)
    return True
