"""Deprecated module paths of version 0.1, which keep working for one release with a warning.

:data:`MOVED` is the table of moved modules. Importing an old path warns and gives a module that
looks up its names in the new modules. The next release drops this file, its import in
``coterie/__init__`` and the ``__getattr__`` of ``coterie/results/__init__``.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "coterie"

# Old module -> the new modules that hold its names, both without the package's own name.
MOVED: dict[str, tuple[str, ...]] = {
    "alarms": ("results.alarms",),
    "algorithm": ("core.algorithm",),
    "archives": ("storage.archives",),
    "assemble": ("experiment.assemble",),
    "augment": ("core.augment",),
    "buffers": ("core.buffers",),
    "cache": ("storage.cache",),
    "checkpoint": ("experiment.checkpoint",),
    "checks": ("experiment.config.checks",),
    "cli": ("commands.cli",),
    "client": ("core.client", "core.batches", "core.losses"),
    "comparison_folder": ("experiment.comparison_folder",),
    "config": ("experiment.config.loading",),
    "descent": ("core.descent",),
    "doctor": ("commands.doctor",),
    "draws": ("core.random",),
    "drive": ("experiment.runner",),
    "faults": ("storage.faults",),
    "files": ("storage.files",),
    "formats": (
        "experiment.run_folder.stored_models",
        "experiment.run_folder.stored_arrays",
        "experiment.run_folder.stored_logs",
    ),
    "guard": ("training.guard", "core.messages"),
    "history": ("results.history", "results.summary"),
    "imports": ("core.imports",),
    "interrupt": ("experiment.interrupt",),
    "judgement": ("results.judgement",),
    "leftover": ("experiment.resume",),
    "lock": ("storage.lock",),
    "mean_gain": ("results.mean_gain",),
    "methods": ("experiment.config.methods",),
    "metrics": ("core.metrics", "results.statistics", "results.collaboration"),
    "mixing": ("core.mixing",),
    "model": ("core.flat",),
    "models": ("networks.registry",),
    "names": ("core.fields",),
    "optim": ("core.optim",),
    "packing": ("storage.packing",),
    "paired": ("core.paired",),
    "ranges": ("core.ranges",),
    "results": ("report.outcomes", "results.judgement"),
    "run": ("training.rounds",),
    "schema": ("experiment.config.schema",),
    "screen": ("commands.console",),
    "shelves": ("engines.states",),
    "show": ("commands.catalog",),
    "source": ("experiment.source",),
    "store": ("experiment.run_folder", "experiment.run_folder.names", "experiment.environment"),
    "table": ("core.rows",),
    "task": ("core.recipe", "core.problem", "core.shards", "core.batches"),
    "tree": ("core.tree",),
}
# Names that were replaced: (old module, old name) -> (new module, new name).
REPLACED: dict[tuple[str, str], tuple[str, str]] = {
    ("run", "run"): ("training.rounds", "train"),
    ("task", "Task"): ("core.problem", "Problem"),
}
# Packages that have the name of an old module -> the old module's names that they still provide.
PACKAGES: dict[str, tuple[str, ...]] = {"results": ("LOCAL", "Comparison", "RunResult")}


def moved_attribute(old: str, name: str) -> Any:
    """The attribute ``name`` of an old module, from the new modules; else AttributeError."""
    if (old, name) in REPLACED:
        home, new = REPLACED[old, name]
        return vars(importlib.import_module(f"{PACKAGE}.{home}"))[new]
    if not name.startswith("__"):
        for home in MOVED[old]:
            module = importlib.import_module(f"{PACKAGE}.{home}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module '{PACKAGE}.{old}' has no attribute '{name}'")


def package_attribute(old: str, name: str) -> Any:
    """As :func:`moved_attribute`, for a package that has the name of an old module; warns."""
    if name not in PACKAGES[old]:
        raise AttributeError(f"module '{PACKAGE}.{old}' has no attribute '{name}'")
    _warn(old, 3)
    return moved_attribute(old, name)


def _warn(old: str, level: int) -> None:
    """Warn that an old path is used, and say where its names are."""
    homes = " and ".join(f"{PACKAGE}.{home}" for home in MOVED[old])
    text = f"{PACKAGE}.{old} has moved to {homes}; the next release no longer has the old path"
    warnings.warn(text, DeprecationWarning, stacklevel=level + 1)


class _OldModule(ModuleType):
    """A module under an old path: every name is looked up in the new modules."""

    def __getattr__(self, name: str) -> Any:
        return moved_attribute(self.__name__.removeprefix(f"{PACKAGE}."), name)


class OldPaths:
    """An import finder for the modules of MOVED under their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The old module; None for every other name."""
        package, _, old = fullname.partition(".")
        known = package == PACKAGE and old in MOVED and old not in PACKAGES
        return ModuleSpec(fullname, self) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Warn, and return a module that has no names of its own."""
        _warn(spec.name.partition(".")[2], 2)
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def install() -> None:
    """Make the old paths importable."""
    sys.meta_path.append(OldPaths())
