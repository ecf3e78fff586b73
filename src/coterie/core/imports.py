"""Imports the classes that a config names, from allowed places only.

A config names code outside this package as ``package.module:Class``. Importing a module runs it, so
the module is looked for in allowed places only, without running anything: in the folders that the
user named (``--code DIR``, ``code=`` in Python) and, for a config that the user wrote, among the
installed packages (the interpreter's ``site-packages``). The current directory, the config's own
folder and PYTHONPATH are never searched, and the standard library is never named.

A folder of results may come from somebody else. The code that its config names is imported only
where the user allows it: ``--code DIR``, or ``--code installed`` for an installed package.
"""

import importlib
import importlib.util
import os
import re
import site
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from ..errors import ConfigError

GIVEN = "given"  # in place of a module: an object of Code.objects
INSTALLED = "installed"  # as the value of --code: any installed package
Given = str | Path | Iterable[str | Path] | None  # the parameter ``code`` of the Python functions
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
class Code:
    """The places from which code named in a config may be imported; by default none.

    ``objects`` are those that a Python program passed in place of a name; they are not imported.
    """

    folders: tuple[Path, ...] = ()
    installed: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, given: Given, *, installed: bool) -> "Code":
        """The places that the user named, and installed packages if ``installed``."""
        named = [given] if isinstance(given, str | Path) else list(given or ())
        folders = [Path(each) for each in named if each != INSTALLED]
        for folder in folders:
            if "\0" in str(folder) or not folder.is_dir():
                raise ConfigError(
                    f"--code: '{folder}' is no folder; expected the folder that holds the module, "
                    f"or the word '{INSTALLED}'"
                )
        found = tuple(dict.fromkeys(folder.resolve() for folder in folders))
        return cls(found, installed or INSTALLED in named)

    @property
    def places(self) -> list[str]:
        installed = []
        if self.installed:
            user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
            installed = [*site.getsitepackages(), *user]
        return [*installed, *map(str, self.folders)]


INSTALLED_ONLY = Code(installed=True)


def names_class(name: str) -> bool:
    """Whether a text has the form ``package.module:Class``."""
    return _NAME.fullmatch(name) is not None


def imported_dataclass(name: str, kind: type[Any], where: str, code: Code) -> type[Any]:
    """Import a dataclass that extends ``kind``: a config sets its fields."""
    found = imported(name, kind, where, code)
    if not is_dataclass(found):
        raise ConfigError(
            f"{where}: '{name}' is {found!r}; expected a dataclass that extends "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return found


def imported(name: str, kind: type[Any], where: str, code: Code) -> type[Any]:
    """Import the subclass of ``kind`` named ``package.module:Class``; anything else is refused.

    Nothing else is ever called: a config could name any function of an allowed place.
    """
    found = _imported(name, where, code)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(
            f"{where}: '{name}' is {found!r}; expected a class that extends "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return found


def _imported(name: str, where: str, code: Code) -> Any:
    """Import what is named ``package.module:name`` from the allowed places."""
    module, _, attribute = name.partition(":")
    if module == GIVEN:
        raise ConfigError(
            f"{where}: '{name}' was passed from a Python program and is in no file; expected it to "
            "be passed again: coterie.compare(…, out=…) with the same object continues the run"
        )
    if not names_class(name) or "__main__" in module.split("."):
        raise ConfigError(f"{where}: found '{name}'; expected package.module:Class")
    _check_place(name, module.partition(".")[0], where, code)
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{where}: '{name}' cannot be imported ({error}); expected package.module:Class"
        ) from error
    return found


def _check_place(name: str, top: str, where: str, code: Code) -> None:
    """Refuse a module outside the allowed places, without running any of its code."""
    if top in sys.stdlib_module_names:
        raise ConfigError(
            f"{where}: '{name}' is in Python's standard library, or has the name of one of its "
            "modules; expected a module of your own with another name, or an installed package"
        )
    importlib.invalidate_caches()
    allowed = PathFinder.find_spec(top, code.places) if code.places else None
    if allowed is None:
        raise ConfigError(f"{where}: {_not_found(name, code)}")
    sys.path += [str(folder) for folder in code.folders if str(folder) not in sys.path]
    try:
        first = importlib.util.find_spec(top)
    except ValueError:  # a module of this name is loaded but has no specification
        first = None
    expected = _locations(allowed, top, code.places)
    found = [] if first is None else _locations(first, top, sys.path)
    if found != expected:
        raise ConfigError(
            f"{where}: '{name}' would be imported from {', '.join(found) or 'elsewhere'}; expected "
            f"{', '.join(expected)}; rename the module: another one has its name"
        )


def _not_found(name: str, code: Code) -> str:
    if not code.installed and not code.folders:
        return (
            f"the code '{name}', which this folder of results names, is not run, because whoever "
            "wrote the folder chose it; if you trust it, say where it is: --code DIR for a folder "
            f"with the module, --code {INSTALLED} for an installed package"
        )
    places = [INSTALLED + " packages"] if code.installed else []
    looked = " and ".join([*places, *map(str, code.folders)])
    return (
        f"'{name}' cannot be imported (looked in {looked}; the current directory is not searched); "
        "expected package.module:Class; name the folder of its module by --code DIR"
    )


def _locations(spec: ModuleSpec, top: str, places: Iterable[str]) -> list[str]:
    """The file that a module is read from, or all folders of a namespace package.

    The specification of a namespace package computes its folders from ``sys.path`` at every access.
    """
    folders = [Path(place, top) for place in places if Path(place, top).is_dir()]
    found = [os.path.realpath(each) for each in ([spec.origin] if spec.origin else folders)]
    return list(dict.fromkeys(found))
