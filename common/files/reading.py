"""Reading of files that may be damaged: by a disk, a kill, or whoever else writes to the folder."""

import difflib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.common.errors import ConfigError, MalformedMessage, OtherRelease
from penstock.common.text import short
from penstock.common.wire.plain import DEEPEST, PlainData, find_fault

DAMAGE = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError,
    MalformedMessage,
)  # fmt: skip
"""The errors of code that reads a file which has another content than expected."""

ADAPTER = "adapter_config.json"
"""The file by which transformers and peft know an adapter."""

_DEEPEST = DEEPEST + 8  # a row of evaluations.jsonl holds the columns of a data set


@contextmanager
def reading(what: Path | str, remedy: str) -> Iterator[None]:
    """Turn an error of the block that damaged content causes into a ConfigError.

    These are ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError
    and MalformedMessage. All others, such as OSError for a missing file, pass through, and OtherRelease
    too. `what` is the file, or its name, and `remedy` the sentence that says what to do: both are in the
    error.
    """
    try:
        yield
    except OtherRelease:
        raise
    except DAMAGE as error:
        raise ConfigError(f"{what}: damaged ({explain(error)}). {remedy}") from error


def absence(name: Path | str) -> str:
    """Return a sentence that no file or folder is called `name`, with a similar name beside it if any.

    Example: "no such file or folder (seen from /home/me): did you mean runs/demo-base-1?"
    """
    path, known = Path(name), []
    try:
        if path.is_symlink():
            return f"a link to {path.readlink()}, which is not there"
        known = os.listdir(path.parent)[:1000] if path.parent.is_dir() else []
    except OSError as error:
        return f"it cannot be looked at ({error.strerror}), seen from {Path.cwd()}"
    near = difflib.get_close_matches(path.name, known, n=1)
    asked = f": did you mean {path.with_name(near[0])}?" if near else ""
    return f"no such file or folder (seen from {Path.cwd()}){asked}"


def read_text(path: Path, asked: str) -> str:
    """Return the text of a file that a user wrote and named.

    Raise ConfigError if the file cannot be read, or is not UTF-8. The error begins with `asked`, the
    setting or flag with its value, such as "--procfile my/Procfile".
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows writes a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        expected = "Expected a file of UTF-8 text: correct the name or the file"
        raise ConfigError(f"{asked}: cannot be read: {error}. {expected}") from error


def explain(error: Exception) -> str:
    """Return the text of an error that damaged content caused, cut to 200 characters.

    Of a KeyError, return "NAME is missing".

    Example:
        >>> explain(KeyError("step"))
        'step is missing'
    """
    if isinstance(error, KeyError):
        return f"{short(error.args[0] if error.args else error)} is missing"
    return short(error)


def parse_json(text: str | bytes) -> PlainData:
    """Return the value of a JSON text: None, a truth value, number, text, list or dictionary.

    Raise ValueError if the text is no JSON, is nested over 40 levels deep, or has an object with a key
    twice, an integer over 64 bits or a lone surrogate.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError(
            f"a JSON text is nested too deep, expected at most {_DEEPEST} levels: write it with fewer"
        ) from error
    if fault := find_fault(value, _DEEPEST):
        raise ValueError(fault)
    return value


def _unique(pairs: list[tuple[str, PlainData]]) -> dict[str, PlainData]:
    """Return a dictionary of the pairs of a JSON object. Raise ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(
            f"the key {short(repeated)} is there twice in a JSON object, expected once: remove one"
        )
    return found


def hash_model(folder: Path) -> str:
    """Return the SHA-256, in hexadecimal, of a model's folder, which identifies the model.

    Hashed are *.json, *.jinja and *.safetensors, with their names, in order of names. Other files and
    subfolders do not count. Raise OSError if the folder or one of these files cannot be read.
    """
    digest = hashlib.sha256()
    kinds = (".json", ".jinja", ".safetensors")
    for path in sorted(path for path in folder.iterdir() if path.suffix in kinds):
        digest.update(f"{path.name}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def at_home(value: Any) -> Any:
    """Return a text or path, or each of a list, with the home folder for ~/, also in NAME=~/PLACE."""
    if isinstance(value, list):
        return [at_home(one) for one in value]
    return type(value)(re.sub(r"(^|= *)~(?=/)", rf"\g<1>{os.path.expanduser('~')}", str(value)))
