"""Who may read the files of a run: RUN_UMASK, set while a command works."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE


@contextmanager
def umask(octal: str) -> Iterator[None]:
    """Set the process's umask to an octal number during the block, then to what it was before.

    The umask is restored after an error too. Child processes and libraries obey it. Example: with "027"
    new files have mode 0640 and new folders 0750. Raise ValueError if `octal` is no octal number.
    """
    before = os.umask(int(octal, 8))
    try:
        yield
    finally:
        os.umask(before)


def share(folder: Path) -> None:
    """Give all folders below `folder` its mode, and all files its mode without execution.

    Some libraries ignore the umask: safetensors gives each of its files mode 0600. Of a link
    its target is changed. Raise OSError if a mode cannot be changed.
    """
    mode = S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)
