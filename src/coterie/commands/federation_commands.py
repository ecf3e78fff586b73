"""``coterie coordinator`` and ``coterie federate``: the coordinator, and a first look."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError, printable

MONITOR = typer.Option(
    metavar="[HOST:]PORT", help="answer /healthz and /metrics there; on loopback without a host"
)
LOG_JSON = typer.Option("--log-json", help="log lines are JSON objects")


def coordinator(
    folder: Annotated[Path, typer.Argument(help="folder of the federation", metavar="FED")],
    monitor: Annotated[str | None, MONITOR] = None,
    log_json: Annotated[bool, LOG_JSON] = False,
) -> None:
    """Carry messages between 'coterie run --federation' and the sites, until it is stopped."""
    from ..deploy.coordinator import run_coordinator
    from ..deploy.folders import FederationFolder

    run_coordinator(FederationFolder.open(folder), monitor, log_json)


def federate(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file; without it, a small built-in example", metavar="CONFIG"),
    ] = None,
    local: Annotated[
        int | None,
        typer.Option(
            "--local",
            min=2,
            max=50,
            help="number of sites on this machine; data with clients of its own has as many sites",
        ),
    ] = None,
    methods: Annotated[str | None, typer.Option(help="separated by commas")] = None,
    rounds: Annotated[int | None, typer.Option(help="communication rounds")] = None,
    folds: Annotated[int | None, typer.Option(help="parts of all rows that test in turn")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the results")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="new folder for the sites' folders and logs, which stay")
    ] = None,
) -> None:
    """A whole federation on this machine: divide a dataset, start sites, and compare methods.

    Every site is a process with its own data, keys and folder, as it would be on its own machine.
    """
    from .. import api
    from ..deploy.local_federation import local_sites, running
    from ..runs.config.loading import default_out
    from .arguments import flags
    from .console import show, show_comparison
    from .live import watching

    if config is None and local is None:
        local = 3
    given = flags({"methods": methods, "rounds": rounds, "folds": folds})
    given |= flags({"clients": local, "out": out})
    if config is None:  # the example's hidden groups: some sites fit together, others do not
        given["set"] = {"partition.groups": 2}
    divided = api.configure(None if config is None else str(config), **given)
    with ExitStack() as scope:
        home = keep or Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
        if keep is not None and keep.exists():
            raise ConfigError(f"--keep: {keep} exists; expected a new folder")
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        sites, asked = local_sites(divided, home)
        show(f"starting a coordinator and {len(sites)} sites in {home}")
        scope.enter_context(running(home, sites))
        asked = default_out(asked)
        runs = len(asked.methods()) * len(asked.seeds)
        with watching(asked, runs) as watch:
            found = api.compare_config(asked, [watch])
        show_comparison(found)
        if keep is not None:
            print(printable(f"sites: {home}"))
