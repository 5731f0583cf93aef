"""Files in an object store or a shared folder, by fsspec: s3://, gs://, az://, abfs:// and file://."""

import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.common.errors import PenstockError, ServerUnavailable
from penstock.common.log import shorten

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "file": "fsspec"}
"""By scheme of a URL, the package that fsspec needs for it."""
_CHUNK = 1 << 20


class StoreFailed(ServerUnavailable):
    """An object store did not do what it was asked for. A later try may succeed."""


def is_store(url: str) -> bool:
    """Return whether a URL names an object store, by its scheme."""
    return url.partition("://")[0] in PACKAGES and "://" in url


def read_file(url: str, begin: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file from byte `begin` on. Raise StoreFailed if it has another size."""
    with _naming(url, "read"):
        files, path = _open(url)
        found = files.info(path)
        if found["type"] != "file" or found["size"] != size:
            raise StoreFailed(
                f"{url} is a {found['type']} of {found['size']} bytes, expected a file of {size}: it is "
                "not the announced one"
            )
        with files.open(path, "rb", block_size=_CHUNK, cache_type="readahead") as file:
            file.seek(begin)
            while begin < size and (chunk := file.read(min(_CHUNK, size - begin))):
                begin += len(chunk)
                yield chunk


def put_file(file: Path, url: str, progress: Callable[[], None]) -> None:
    """Copy a file to `url`, in place of one there. `progress` is called meanwhile. Raise StoreFailed."""
    from fsspec.callbacks import Callback

    class Progress(Callback):  # type: ignore[misc]
        """Tells of each part that was sent."""

        def relative_update(self, inc: int = 1) -> None:
            progress()

    with _naming(url, "written"):
        files, path = _open(url)
        files.makedirs(posixpath.dirname(path), exist_ok=True)
        files.put_file(str(file), path, callback=Progress())


def list_folder(url: str) -> list[str]:
    """Return the names in a folder of the store, sorted. Raise StoreFailed."""
    with _naming(url, "listed"):
        files, path = _open(url)
        files.invalidate_cache()
        return sorted(found.rstrip("/").rpartition("/")[2] for found in files.ls(path, detail=False))


def remove_folder(url: str) -> None:
    """Delete a folder with its files. Raise StoreFailed."""
    with _naming(url, "deleted"):
        files, path = _open(url)
        files.rm(path, recursive=True)


def _open(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, with the path there. Raise what fsspec raises."""
    from fsspec.core import url_to_fs

    files, path = url_to_fs(url)
    return files, str(path)


@contextmanager
def _naming(url: str, done: str) -> Iterator[None]:
    """Raise StoreFailed for an error of the block. `done` is what could not be done with the URL."""
    try:
        yield
    except PenstockError:
        raise
    except ImportError as error:
        package = PACKAGES[url.partition("://")[0]]
        raise StoreFailed(f"{url} needs a package: `pip install {package}` ({error})") from error
    except Exception as error:  # each store's package has errors of its own
        raise StoreFailed(
            f"{url} cannot be {done}: {shorten(repr(error))}; see its address, this host's network, and "
            "the rights of the credentials in the environment"
        ) from error
