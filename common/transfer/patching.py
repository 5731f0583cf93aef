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


def patch(source: Source, view: RunView | None, weights: Weights, folder: Path) -> bool:
    """Make the file of announced weights of an earlier version; return whether it is there now.

    `folder` has the fetched versions, each in versions/HASH, and gets the deltas, from the queue server
    (`view`) if they are there, else from `source`. Block meanwhile. Return False if no version is there
    that the announced deltas begin with, if they have as many bytes as the whole file, or if one cannot
    be used, which is logged. Raise FetchFailed if another process holds the lock for too long, and
    Connection.execute's errors.
    """
    if not (deltas := _usable(weights, versions := folder / "versions")):
        return False
    base, target = (versions / of / weights.file for of in (deltas[0].parent, weights.hash))
    try:
        with alone(target.parent):
            if target.exists():
                return False
            files = [_fetch(source, view, delta, folder / "deltas" / delta.hash) for delta in deltas]
            fault = _apply(weights, files, base, target)
    except (DeltaNotFetched, OSError, ImportError) as error:
        fault = str(error)
    if fault:
        log.info(f"Version {weights.version} is fetched whole: {fault}.")
    return not fault


def _usable(weights: Weights, versions: Path) -> Sequence[Delta]:
    """Return the fewest announced deltas that begin with a version that is here, () if too large.

    That version's file is as large as the announced one, which bounds what a delta may have.
    """
    for first in range(len(weights.deltas) - 1, -1, -1):
        deltas = weights.deltas[first:]
        if sum(one.size for one in deltas) >= weights.size:
            break
        if not all(HASH.fullmatch(digest) for digest in (deltas[0].parent, deltas[0].hash)):
            break
        base = versions / deltas[0].parent / weights.file
        if os.path.isfile(base):
            return deltas if os.path.getsize(base) == weights.size else ()
    return ()


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
    """Make the file `target` of the file `base` by deltas; return "", or why it is not there.

    Raise OSError if a file cannot be read or written, ImportError without numba or zstandard.
    """
    from penstock.common.transfer.delta import BadDelta, apply_deltas

    aside = target.with_name(f".{target.name}.patched")
    try:
        if apply_deltas(base, deltas, aside) != weights.hash:
            return "the deltas make another file of the one that is here"
        aside.replace(target)
    except BadDelta as error:
        return str(error)
    finally:
        aside.unlink(missing_ok=True)
    return ""
