"""Rewards and trackers that a setting names as `file.py:function` or `package.module.function`."""

import hashlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from penstock.common.errors import ConfigError


def split_source(asked: str) -> tuple[str, str]:
    """Return the source ("" for what comes with Penstock) and the name of a function in it.

    Example:
        >>> split_source("accuracy"), split_source("my/rewards.py:short"), split_source("pkg.mod.short")
        (('', 'accuracy'), ('my/rewards.py', 'short'), ('pkg.mod', 'short'))
    """
    source, _, name = asked.rpartition(":" if ":" in asked else ".")
    return source, name


def find_code(source: str, setting: str) -> ModuleSpec:
    """Return where the code of a source is: a file, or a module that can be imported here.

    Only the packages around a module are run. `setting`, such as "LEARNER_REWARDS=short.py:short",
    begins the text of errors. Raise ConfigError if the code is not found or a package around it fails.
    """
    if source.endswith(".py"):
        path = Path(source).absolute()
        name = f"penstock_own_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
        found = importlib.util.spec_from_file_location(name, path)
        hint = f"there is no file {path}; copy the file there, or correct its name"
    else:
        try:
            found = importlib.util.find_spec(source)
        except (Exception, SystemExit) as error:  # the package's own code runs, and may raise anything
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{setting}: {source} cannot be imported: {cause}; correct it") from error
        remedy = "name a file (file.py:function), or put the folder it is in on PYTHONPATH"
        hint = f"there is no module {source} here; {remedy}"
    if found is None or found.loader is None or not path_of(found).is_file():
        raise ConfigError(f"{setting}: {hint}")
    return found


def path_of(code: ModuleSpec) -> Path:
    """Return the file that holds the code."""
    return Path(str(code.origin))


def digest_of(code: ModuleSpec) -> str:
    """Return the SHA-256 of the code's file, in hexadecimal. Raise OSError if it cannot be read."""
    return hashlib.sha256(path_of(code).read_bytes()).hexdigest()


def import_code(code: ModuleSpec) -> ModuleType:
    """Run the code and return its new module. Whatever the code raises is raised.

    Modules beside a file come first in imports, as when Python runs the file itself: `common` in
    `from common import helper` is the folder beside the file, whatever else has that name.
    """
    folder = str(path_of(code).parent)
    if code.name.startswith("penstock_own_") and folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(code)
    sys.modules[code.name] = module
    assert code.loader is not None, "find_code returns no module without a loader"
    code.loader.exec_module(module)
    return module


def public_names(module: ModuleType) -> str:
    """Return a module's names without a leading underscore, separated by commas."""
    return ", ".join(name for name in vars(module) if not name.startswith("_"))
