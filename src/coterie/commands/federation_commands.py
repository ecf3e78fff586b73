"""``coterie coordinator`` and ``coterie federate``: the coordinator, and a first look."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, printable


def coordinator(
    folder: Annotated[Path, typer.Argument(help="folder of the federation", metavar="FED")],
) -> None:
    """Carry messages between 'coterie run --federation' and the sites, until it is stopped."""
    from ..deploy.folders import FederationFolder
    from ..deploy.running import run_coordinator

    run_coordinator(FederationFolder.open(folder))


def federate(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file; without it, a small built-in example", metavar="CONFIG"),
    ] = None,
    local: Annotated[
        int, typer.Option("--local", min=2, max=50, help="number of sites on this machine")
    ] = 3,
    methods: Annotated[str | None, typer.Option(help="separated by commas")] = None,
    rounds: Annotated[int | None, typer.Option(help="communication rounds")] = None,
    transport: Annotated[str, typer.Option(help="direct or flower")] = "direct",
    out: Annotated[Path | None, typer.Option(help="folder for the results")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="new folder for the sites' folders and logs, which stay")
    ] = None,
) -> None:
    """A whole federation on this machine: divide a dataset, start sites, and compare methods.

    Every site is a process with its own data, keys and folder, as it would be on its own machine.
    """
    from .. import api
    from ..deploy.local_federation import make_folders, running
    from ..runs.assemble import assemble
    from ..runs.config.loading import default_out
    from .arguments import flags
    from .console import show, show_comparison
    from .live import watching

    given = flags({"methods": methods, "rounds": rounds, "clients": local, "out": out})
    if config is None:  # the example's hidden groups: some sites fit together, others do not
        given["set"] = {"partition.groups": 2}
    divided = api.configure(None if config is None else str(config), **given)
    federation = assemble(divided).federations[divided.run.seed]
    with ExitStack() as scope:
        home = keep or Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
        if keep is not None and keep.exists():
            raise ConfigError(f"--keep: {keep} exists; expected a new folder")
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        sites = make_folders(home, federation, transport)
        show(f"starting a coordinator and {len(sites)} sites ({transport}) in {home}")
        fed = scope.enter_context(running(home, sites))
        asked = default_out(api.configure(_of_sites(divided), federation=str(fed.path)))
        runs = len(asked.methods()) * len(asked.seeds)
        with watching(asked, runs) as watch:
            found = api.compare_config(asked, [watch])
        show_comparison(found)
        if keep is not None:
            print(printable(f"sites: {home}"))


def _of_sites(config: Any) -> dict[str, Any]:
    """The tables of a config without what sites decide themselves: data, partition, engine."""
    from ..runs.config.loading import canonical

    tables = canonical(config)
    shared = {name: tables["data"][name] for name in ("val", "test", "scale")}
    rest = {name: table for name, table in tables.items() if name not in ("partition", "engine")}
    return {**rest, "data": shared}
