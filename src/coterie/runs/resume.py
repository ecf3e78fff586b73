"""Finds an unfinished run in its folder and continues it from its newest checkpoint."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from ..core.calls import COMPILED
from ..core.tree import Tree
from ..errors import CoterieWarning, StoreError
from ..storage import files
from ..training.rounds import Begin
from . import checkpoint, kinds, run_folder
from .config.loading import WRITTEN
from .config.schema import EngineTable, Table
from .run import RAN, Log

SAME = ("coterie", "source", "python", "versions", "device", "device_name", "threads")


class UnfinishedRun(NamedTuple):
    """An unfinished run: its folder, config and environment."""

    path: Path
    config: dict[str, Any]  # its config.json
    environment: dict[str, Any]

    @property
    def tables(self) -> Table:
        """The config as it was asked for."""
        own = {key: table for key, table in self.config.items() if key not in WRITTEN}
        return {**own, **self.config["asked"]}

    @property
    def ways(self) -> dict[str, str]:
        """How the run executed each form of a call, by the form's id."""
        return {name: form["way"] for name, form in self.environment.get(RAN, {}).items()}

    def refuse_other(self, asked: str) -> None:
        """Refuse to continue the run as another experiment."""
        if self.config["hash"] != asked:
            raise StoreError(
                f"{self.path}: holds an unfinished run of another config (hash "
                f"{str(self.config['hash'])[:12]}); expected {asked[:12]}; nothing was changed; "
                "resume with the config, data and version it began with, or choose another folder "
                "with --out"
            )

    def engine(self, asked: EngineTable) -> EngineTable:
        """The engine that was chosen when the run began, in place of "auto"."""
        chosen = dict(self.config["resolved"])
        known = {key: value for key, value in chosen.items() if key in EngineTable.model_fields}
        threads = chosen.get("threads") or self.environment.get("threads")
        update = {**known, "threads": threads}
        try:
            return EngineTable.model_validate(
                {**asked.model_dump(), **update, "name": chosen["engine"]}
            )
        except (KeyError, ValidationError) as error:
            raise _altered(self.path) from error


def unfinished_run(path: Path) -> UnfinishedRun | None:
    """The unfinished run in a folder; None if there is none."""
    run_folder.refuse_links(path)
    if run_folder.is_finished(path) or not (path / run_folder.CONFIG).is_file():
        return None
    run_folder.refuse_other_format(path / run_folder.CONFIG)
    config = files.read_json(path / run_folder.CONFIG)
    where = path / run_folder.ENVIRONMENT
    environment = files.read_json(where) if where.is_file() else {}
    try:
        kinds.Started.model_validate(config)
        kinds.Environment.model_validate(environment)
    except ValidationError as error:
        raise _altered(path) from error
    return UnfinishedRun(path, config, environment)


def _altered(path: Path) -> StoreError:
    return StoreError(
        f"{path}: {run_folder.CONFIG} and {run_folder.ENVIRONMENT} are not as a run writes them; "
        "expected its config, hash, resolved engine and command; the run cannot be continued, "
        "start it again in another folder"
    )


def reopen(
    found: UnfinishedRun,
    log: Log,
    start: tuple[Tree, Tree],
    where: Mapping[str, Any],
    choice: Mapping[str, Any],
) -> tuple[run_folder.RunFolder, Begin, Path | None]:
    """Reopen an unfinished run; warns of everything that differs from when it was stopped.

    Returns the folder, the state to begin from, and the checkpoint that the state is from.
    """
    _refuse_uncompiled(found, choice)
    stored, wrong = checkpoint.newest(found.path)
    for sentence in wrong:
        _warn(f"{sentence}; falling back to an earlier round")
    changed = differences(found.environment, where)
    if dict(choice) != found.config["resolved"]:
        changed["engine"] = (found.config["resolved"], dict(choice))
    for name, (before, now) in changed.items():
        _warn(f"{name} was {before} and is {now}: the last bits of the results may differ")
    done = 0 if stored is None else stored.rounds
    for name, entry in ({} if stored is None else stored.logs).items():
        files.shorten(found.path / name, entry["bytes"])
    folder = run_folder.RunFolder.reopen(found.path, log, done)
    folder.note_resumed(done, where, {name: now for name, (_, now) in changed.items()})
    if stored is None:
        return folder, Begin(0, *start), None
    first, states = start
    none = torch.zeros(len(log.roster), dtype=torch.float64)
    (server, accepted), states = checkpoint.restore(stored, (first, none), states)
    return folder, Begin(done, server, states, accepted), stored.folder


def _refuse_uncompiled(found: UnfinishedRun, choice: Mapping[str, Any]) -> None:
    """Refuse to continue compiled steps without a compiler: the last bits would differ."""
    compiled = COMPILED in found.ways.values()
    if compiled and not choice.get("compiled"):
        by = found.config["resolved"].get("compiler")
        raise StoreError(
            f"{found.path}: its steps were compiled by {by}, and there is no C++ compiler here; "
            "going on without one would change the last bits of the results; install that "
            "compiler or name it with CXX, or start a new run with --out"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What may change the last bits of a result and has changed: (before, now) by name."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in SAME:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
            found |= {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        elif old != new and name in before:
            found[name] = (old, new)
    return found


def _warn(text: str) -> None:
    warnings.warn(text, CoterieWarning, stacklevel=3)
