"""Files in an object store or a shared folder, by fsspec: s3://, gs://, az://, abfs:// and file://."""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from penstock.common.deadline import Result, run_aside
from penstock.common.errors import PenstockError, ServerUnavailable
from penstock.common.log import shorten

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "file": "fsspec"}
"""By scheme of a URL, the package that fsspec needs for it."""
_CHUNK, _BLOCK = 1 << 20, 32 << 20
"""Bytes that are handed on at a time, and bytes that a store is asked for at a time."""
_FOLDER = "file://"
_SILENCE_S = 600.0
"""Longest wait for an answer of a store, whose package may have no limit of its own."""


class StoreFailed(ServerUnavailable):
    """An object store did not do what it was asked for. A later try may succeed."""


class PackageMissing(StoreFailed):
    """The package that fsspec needs for such URLs is not installed."""


def is_store(url: str) -> bool:
    """Return whether a URL names an object store, by its scheme."""
    return url.partition("://")[0] in PACKAGES and "://" in url


def is_plain_store(parts: SplitResult) -> bool:
    """Return whether a store's URL has a bucket (file:// has no host) and a plain path.

    A host's name in place of a container is refused: az:// would send the credentials to its account.
    """
    plain = ".." not in parts.path.split("/") and ":" not in f"{parts.netloc}{parts.path}"
    if parts.scheme == "file":
        return plain and not parts.netloc and parts.path.startswith("/")
    return plain and bool(parts.netloc) and (parts.scheme in ("s3", "gs") or "." not in parts.netloc)


def read_file(url: str, begin: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file from byte `begin` on. Raise StoreFailed if it has another size."""
    with _naming(url, "read"):
        files, path = _in_time(partial(_open, url))
        found = _in_time(partial(files.info, path))
        if found["type"] != "file" or found["size"] != size:
            raise StoreFailed(
                f"{url} is a {found['type']} of {found['size']} bytes, expected a file of {size}: it is "
                "not the announced one"
            )
        opening = partial(files.open, path, "rb", block_size=_BLOCK, cache_type="readahead")
        file = _in_time(opening)
        try:
            file.seek(begin)
            while begin < size and (chunk := _in_time(partial(file.read, min(_CHUNK, size - begin)))):
                begin += len(chunk)
                yield chunk
        finally:
            run_aside(file.close)  # it waits for a read that does not end


def _in_time(work: Callable[[], Result]) -> Result:
    """Return what `work` returns. Raise TimeoutError after 600 s, and leave it to its thread."""
    done = run_aside(work)
    if not wait([done], _SILENCE_S).done:
        raise TimeoutError(f"no answer within {_SILENCE_S:g} s")
    return done.result()


def put_file(file: Path, url: str, progress: Callable[[], None]) -> None:
    """Copy a file to `url`, in place of one there. `progress` is called meanwhile. Raise StoreFailed."""
    with _naming(url, "written"):
        files, path = _open(url)
        if url.startswith(_FOLDER):
            _copy(file, Path(path), progress)
        else:
            files.put_file(str(file), path, callback=_callback(progress))


def _copy(file: Path, target: Path, progress: Callable[[], None]) -> None:
    """Copy a file within this host, so that nobody finds half of it at `target`. Raise OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with file.open("rb") as source, part.open("wb") as copy:
        while chunk := source.read(_CHUNK):
            copy.write(chunk)
            progress()
    part.replace(target)


def _callback(progress: Callable[[], None]) -> Any:
    """Return a callback for fsspec that calls `progress` for each part that was sent."""
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc]
        """Tells of each part, however a store's package counts them."""

        def call(self, *_: Any, **__: Any) -> None:
            progress()

    return Progress()


def list_folder(url: str) -> list[str]:
    """Return the names in a folder of the store, sorted. Raise StoreFailed."""
    with _naming(url, "listed"):
        files, path = _open(url)
        files.invalidate_cache()
        names = _in_time(partial(files.ls, path, detail=False))
        return sorted(found.rstrip("/").rpartition("/")[2] for found in names)


def remove_folder(url: str) -> None:
    """Delete a folder with its files. Raise StoreFailed."""
    with _naming(url, "deleted"):
        files, path = _open(url)
        _in_time(partial(files.rm, path, recursive=True))


def _open(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, with the path there. Raise what fsspec raises."""
    from fsspec.core import url_to_fs

    files, path = url_to_fs(url)
    return files, str(path)


@contextmanager
def _naming(url: str, done: str) -> Iterator[None]:
    """Raise StoreFailed for an error of the block, PackageMissing if a package is not installed.

    `done` is what could not be done with the URL.
    """
    try:
        yield
    except PenstockError:
        raise
    except ImportError as error:
        package = PACKAGES[url.partition("://")[0]]
        raise PackageMissing(f"{url} needs a package: `pip install {package}` ({error})") from error
    except Exception as error:  # each store's package has errors of its own
        raise StoreFailed(
            f"{url} cannot be {done}: {shorten(repr(error))}; see its address, this host's network, and "
            "the rights of the credentials in the environment"
        ) from error
