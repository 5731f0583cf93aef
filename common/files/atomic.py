"""Writes that a crash cannot leave half done: write aside, sync, rename, sync the folder."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError
from penstock.common.failpoint import failpoint
from penstock.common.files.disk import failure_of
from penstock.common.files.modes import share
from penstock.common.files.reading import DAMAGE, explain, parse_json
from penstock.common.log import get_logger

log = get_logger(__name__)


def make_folder(folder: Path, setting: str = "RUN_DIR") -> None:
    """Create a folder and its missing parents; an existing folder stays as it is.

    The umask narrows the mode of `folder` itself. New parents, such as runs/, have mode 0755 whatever
    the umask, because another run in them may be shared. Raise DiskFailed for a broken disk, else
    ConfigError if a folder cannot be made: it names `setting`, by which the user chose the folder.
    """
    try:
        for parent in reversed([parent for parent in folder.parents if not parent.exists()]):
            parent.mkdir(exist_ok=True)
            parent.chmod(0o755)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        if failed := failure_of(error):
            raise failed from error
        raise ConfigError(
            f"{setting}: the folder {folder} cannot be made ({error.strerror}): choose another folder, "
            "or let this user write to its parent folder"
        ) from error


def sync_path(path: Path) -> None:
    """Write a file's data, or a folder's list of names, to the disk, so that they survive a power cut.

    For a folder these are the files made, renamed or deleted in it. Raise OSError if that fails.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace or create the file `path` as a whole: a power cut leaves the old content or `data`.

    The data are written to `.NAME.PID` beside it and synced, this file is renamed, and the folder is
    synced. The umask narrows `mode`. Raise OSError if a step fails, or the folder is missing. Until the
    rename, `path` is unchanged; a failed write or sync deletes the new file.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)  # of a killed process, perhaps with another mode
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink()
        raise
    aside.rename(path)
    sync_path(path.parent)


def append_whole(file: FileIO, data: bytes, end: int, sync: bool = True) -> None:
    """Append `data` to the unbuffered `file` at offset `end`. What lies after `end` is cut off first.

    With `sync` the data are on disk when this returns, without it the system writes them later. Raise
    OSError if a step fails; after a failed write or sync the file is cut back to `end`.
    """
    file.truncate(end)
    file.seek(end)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        if sync:
            failpoint("appended")
            os.fsync(file.fileno())
    except OSError:
        file.truncate(end)
        raise


@contextmanager
def whole_folder(path: Path, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary folder. When the block ends without an error, sync it and put it at `path`.

    Without `sync` a power cut may leave a folder at `path` whose files are not whole.

    The temporary folder is `.NAME.PID` beside `path`; one of the same PID is deleted first. Missing
    parents are created. After the block a folder at `path` is deleted, then the new one is renamed: a
    kill between the two leaves none. All that is below the temporary folder gets its mode, files without
    execution. If the block raises, the temporary folder is deleted and `path` stays. If 64 KiB cannot be
    written then, raise that OSError, such as of a full disk, instead of the block's error.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    kind = path.parent.name
    try:
        yield aside
        share(aside)
        for made in sorted(aside.rglob("*")):
            if sync:
                sync_path(made)
            failpoint(f"{kind}.{made.name}")
        if sync:
            sync_path(aside)
    except BaseException as error:  # KeyboardInterrupt too: no half-written folder stays
        full = _full_disk(aside) if isinstance(error, Exception) else None
        shutil.rmtree(aside, ignore_errors=True)
        if full is not None:
            raise full from error
        raise
    shutil.rmtree(path, ignore_errors=True)
    failpoint(f"{kind}.synced")
    aside.rename(path)
    failpoint(f"{kind}.renamed")
    sync_path(path.parent)


def _full_disk(folder: Path) -> OSError | None:
    """Write 64 KiB to the file `probe` in `folder`, which stays. Return None if this works.

    Else return (do not raise) the OSError, such as a full disk's.
    """
    try:
        (folder / "probe").write_bytes(bytes(1 << 16))
    except OSError as error:
        return error
    return None


def read_json_lines(path: Path, **fields: type) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file of a run, in order; [] without a file.

    Each row has an integer `step`, and `fields` by name and type, such as answer=str. Other lines are
    logged and left out. A last one without a line end, which a kill cut off, is left out unlogged.
    """
    return [row for row in each_json_line(path, **fields) if row is not None]


def each_json_line(path: Path, **fields: type) -> Iterator[dict[str, Any] | None]:
    """Yield the rows that `read_json_lines` returns, one at a time, and None for each line left out.

    A last line without a line end yields nothing. The memory is that of one line.
    """
    if not path.is_file():
        return
    # A file is iterated by line ends; splitlines also splits at U+2028 inside a completion.
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield _row(line, {"step": int, **fields})
            except DAMAGE as error:
                log.error(
                    "A damaged line is left out.", file=str(path), line=number, error=explain(error)
                )
                yield None


def read_row(line: bytes, **fields: type) -> dict[str, Any] | None:
    """Return the row in a line of `read_json_lines`; None if it is damaged, or lacks its end."""
    try:
        row = _row(line.decode(errors="replace"), {"step": int, **fields})
    except DAMAGE:
        return None
    return row if line.endswith(b"\n") else None


def _row(line: str, fields: Mapping[str, type]) -> dict[str, Any]:
    """Return the object that a line of JSON has, with `fields` by name and type.

    Raise TypeError for a field of another type, KeyError for a missing one, ValueError for no JSON.
    """
    row: Any = parse_json(line)
    for name, kind in fields.items():
        if not isinstance(row[name], kind):
            found = type(row[name]).__name__
            raise TypeError(f"{name}: found {found}, expected {kind.__name__}: mend the line")
    return row  # type: ignore[no-any-return]
