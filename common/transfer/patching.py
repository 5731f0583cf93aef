"""Weights made on this host of an earlier version, so that only what changed is fetched."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.common.broker.run_view import RunView
from penstock.common.files.run_folder import version_name
from penstock.common.log import get_logger
from penstock.common.transfer.download import FetchFailed, Source, Wanted, alone, download, store
from penstock.common.wire.messages import DELTA_FILE, Delta, Weights

HASH = re.compile("[0-9a-f]{64}")

log = get_logger(__name__)


class DeltaNotFetched(FetchFailed):
    """A delta could not be fetched. The whole file may be."""


def patch(source: Source, view: RunView | None, weights: Weights, folder: Path) -> list[str]:
    """Make files of announced weights of an earlier version; return the names of those that were made.

    `folder` has the fetched versions, each in versions/HASH, and gets the deltas, from the queue server
    (`view`) if they are there, else from `source`. Block meanwhile. Return [] if no version is there
    that the deltas begin with, if they have as many bytes as the whole, or if one cannot be used, which
    is logged. Raise FetchFailed if another process holds the lock for too long, and the view's errors.
    """
    if not (deltas := _usable(weights, versions := folder / "versions")):
        return []
    base, target = (versions / of for of in (deltas[0].parent, weights.hash))
    names = [one.name for one in weights.tensor_files]
    try:
        with alone(target):
            if all((target / name).exists() for name in names):
                return []
            files = [_fetch(source, view, delta, folder / "deltas" / delta.hash) for delta in deltas]
            fault = _apply(weights, files, base, target)
    except (DeltaNotFetched, OSError, ImportError) as error:
        fault = str(error)
    if fault:
        log.info(f"Version {weights.version} is fetched whole: {fault}.")
    return [] if fault else names


def _usable(weights: Weights, versions: Path) -> Sequence[Delta]:
    """Return the fewest announced deltas that begin with a version that is here, () if too large.

    That version's files are as large as the announced ones, which bounds what a delta may have.
    """
    for first in range(len(weights.deltas) - 1, -1, -1):
        deltas = weights.deltas[first:]
        if sum(one.size for one in deltas) >= weights.size:
            break
        if not all(HASH.fullmatch(digest) for digest in (deltas[0].parent, deltas[0].hash)):
            break
        base = versions / deltas[0].parent
        found = [_size(base / one.name) for one in weights.tensor_files]
        if -1 not in found:
            return deltas if found == [one.size for one in weights.tensor_files] else ()
    return ()


def _size(path: Path) -> int:
    """Return the bytes of a file, -1 if there is none, as when another process has just deleted it."""
    try:
        return os.path.getsize(path) if os.path.isfile(path) else -1
    except FileNotFoundError:
        return -1


def _fetch(source: Source, view: RunView | None, delta: Delta, folder: Path) -> Path:
    """Return the file of a delta, which is fetched into `folder`.

    Raise DeltaNotFetched, OSError, or Connection.execute's errors.
    """
    name = version_name(delta.version.incarnation, delta.version.step)
    wanted, file = Wanted(f"versions/{name}/{DELTA_FILE}", delta.size, delta.hash), folder / DELTA_FILE
    if view is None or not store(wanted, _parts(view, delta), file):
        try:
            download(source, wanted, file)
        except FetchFailed as error:
            raise DeltaNotFetched(str(error)) from error
    return file


def _parts(view: RunView, delta: Delta) -> Iterator[bytes]:
    """Yield the parts of a delta on the queue server, up to the first one that is not as announced.

    Raise Connection.execute's errors.
    """
    for name, size in delta.parts():
        part = view.delta_part(name)
        if part is None or len(part) != size:
            return
        yield part


def _apply(weights: Weights, deltas: Sequence[Path], base: Path, target: Path) -> str:
    """Make the files in the folder `target` of those in `base` by deltas; return "", or why not.

    Raise OSError if a file cannot be read or written, ImportError without numba or zstandard.
    """
    from penstock.common.transfer.delta import BadDelta, apply_deltas

    files = {target / one.name: target / f".{one.name}.patched" for one in weights.tensor_files}
    try:
        made = apply_deltas([base / file.name for file in files], deltas, [*files.values()])
        if made != [one.hash for one in weights.tensor_files]:
            return "the deltas make another file of the one that is here"
        for file, aside in files.items():
            aside.replace(file)
    except BadDelta as error:
        return str(error)
    finally:
        for aside in files.values():
            aside.unlink(missing_ok=True)
    return ""
