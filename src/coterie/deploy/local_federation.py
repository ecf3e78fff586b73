"""A whole federation on this machine: a coordinator and sites as processes, over loopback."""

import contextlib
import re
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..core.shards import SPLITS
from ..data.datasets import DATASETS, file_source
from ..data.federation import Federation
from ..data.sources.tables import TableOptions, open_table
from ..errors import ConfigError, EngineError
from ..runs.assemble import assemble
from ..runs.config.loading import canonical, load
from ..runs.config.schema import Config
from .direct import DirectTransport
from .folders import FederationFolder
from .site_folder import SiteFolder
from .small_files import to_toml
from .terms import SHARED_DATA

PATIENCE = 180.0  # seconds until all sites must be online
PART = "part of the data"  # the column that says how rows are divided


def _write_samples(
    folder: Path, federation: Federation, client: int, folded: bool
) -> dict[str, Any]:
    """Write a client's samples with its labels, divided unless a site deals them to folds."""
    data = federation.dataset if federation.source is None else federation.source
    arrays = {"class_names": np.array(data.class_names, dtype=str)} if data.class_names else {}
    splits = (federation.train[client], federation.val[client], federation.test[client])
    parts = {"train": torch.cat(splits)} if folded else dict(zip(SPLITS, splits, strict=True))
    for name, mine in parts.items():
        y = data.y[mine]
        if federation.relabel is not None:
            y = federation.relabel[client, y]
        if len(mine):
            x = data.x[mine]
            arrays |= {f"x_{name}": x.numpy(), f"y_{name}": y.numpy()}
    file = f"{federation.dataset.name}.npz"
    np.savez(folder / file, **arrays)  # type: ignore[arg-type]
    return {"data": {"name": file}}


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def local_sites(
    config: Config, home: Path, transport: str = "direct"
) -> tuple[list[SiteFolder], Config]:
    """The folders of a federation and of one site per client, and the config that asks them.

    The clients are those of the config's partition, with the division of its seed; the clients of a
    table are sites with a table of their own.
    """
    made, folded = assemble(config), config.run.folds is not None
    divided, federation = made.config, made.federations[made.config.run.seed]
    names = _site_names(federation.clients)
    fed = FederationFolder.create(home / "fed", f"localhost:{free_port()}", transport)
    sites = []
    for client, name in enumerate(names):
        site = SiteFolder.create(home / name, fed.invite, name)
        told = _write_table(site.path, divided, federation, client)
        told = told or _write_samples(site.path, federation, client, folded)
        _allow_all(site.path / "site.toml", told)
        fed.add_site(site.public, name)
        sites.append(SiteFolder.open(site.path))
    return sites, load(_of_sites(divided), {"run.federation": str(fed.path)}, divided.code)


def _allow_all(path: Path, tables: dict[str, Any]) -> None:
    """Add tables to a ``site.toml``; consent to what one owner of all sites need not ask for."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = text.replace(f"\n[{name}]\n", to_toml({name: table}))
    before, consent, after = re.split(r"(?s)(\n\[consent\]\n.*?\n\n)", text)
    text = before + consent.replace("= false", "= true") + after
    text = text.replace("automatic = []", 'automatic = ["*"]')
    text = re.sub(r"(rounds|epochs|parameters|experiments) = \d+", r"\1 = 1000000000", text)
    path.write_text(text, encoding="utf-8")


def _of_sites(config: Config) -> dict[str, Any]:
    """The tables of a config without what sites decide themselves: data, partition, engine."""
    tables = canonical(config)
    shared = {name: tables["data"][name] for name in SHARED_DATA}
    rest = {name: table for name, table in tables.items() if name not in ("partition", "engine")}
    return {**rest, "data": shared}


def _site_names(clients: Sequence[str]) -> list[str]:
    """The names of clients as sites may be called."""
    plain = (unicodedata.normalize("NFKD", client) for client in clients)  # ô is o and an accent
    plain = (re.sub(r"[\u0300-\u036f]", "", client) for client in plain)
    names = [re.sub(r"[^A-Za-z0-9_-]", "-", client)[:40] for client in plain]
    if len({name.casefold() for name in names}) < len(names):
        raise ConfigError(
            f"data.client: the clients {', '.join(clients)[:200]} would have the same names as "
            "sites, of 40 letters, digits, - or _; give them names that differ in these"
        )
    return names


def _write_table(
    folder: Path, config: Config, federation: Federation, client: int
) -> dict[str, Any] | None:
    """Write a client's rows of a table; the tables of ``site.toml`` that read them, or None."""
    if config.data.name in DATASETS or config.partition.name != "natural":
        return None
    source = file_source(config.data.name, **config.data.options)
    if source.format != "table" or federation.relabel is not None:
        return None
    options = TableOptions(**source.options)
    sheet = open_table(source.path, options, 1).sheet.table
    parts = (federation.train[client], federation.val[client], federation.test[client])
    rows = np.concatenate([part.numpy() for part in parts])
    split = np.repeat(["train", "val", "test"], [len(part) for part in parts])
    order = np.argsort(rows)
    folded = config.run.folds is not None  # the site deals its rows to the folds itself
    gone = {options.client} | (set() if folded else {options.split, options.time})
    kept = [name for name in sheet.column_names if name not in gone]
    table = sheet.select(kept).take(rows[order])
    said = {**source.options, "drop": [c for c in options.drop if c in kept]}
    if not folded:
        table, said["split"] = table.append_column(PART, pa.array(split[order])), PART
    pq.write_table(table, folder / "data.parquet")
    own = ("client", "delimiter") if folded else ("client", "time", "delimiter")
    left = {name: value for name, value in said.items() if name not in own and value is not None}
    texts = [name for name in kept if not pa.types.is_floating(sheet.schema.field(name).type)]
    return {"data": {"name": "data.parquet", **left}, "levels": dict.fromkeys(texts, "named")}


@contextlib.contextmanager
def running(home: Path, sites: list[SiteFolder]) -> Iterator[FederationFolder]:
    """Start a coordinator and the sites, each in a process of its own, and end them at last."""
    fed = FederationFolder.open(home / "fed")
    commands = {"coordinator": ["coordinator", str(fed.path)]}
    commands |= {site.name: ["site", "start", str(site.path)] for site in sites}
    started: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as scope:
        for name, command in commands.items():
            log = scope.enter_context((home / f"{name}.log").open("ab"))
            started[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie", *command], stdout=log, stderr=log
            )
        scope.callback(_end, list(started.values()))
        _wait(fed, started, home)
        yield fed


def _wait(fed: FederationFolder, started: dict[str, subprocess.Popen[bytes]], home: Path) -> None:
    """Wait until the coordinator answers and all sites are online."""
    end = time.monotonic() + PATIENCE
    missing = [site.name for site in fed.sites()]
    while missing and time.monotonic() < end:
        for name, process in started.items():
            if process.poll() is not None:
                said = (home / f"{name}.log").read_text(errors="replace").strip()
                raise EngineError(f"{name} ended: {said.rpartition(chr(10))[2]}")
        time.sleep(0.2)
        with contextlib.suppress(EngineError):
            transport = DirectTransport(fed)
            missing = [name for name, state in transport.sites().items() if not state.online]
            transport.close()
    if missing:
        raise EngineError(f"{', '.join(missing)} did not come online; see the logs in {home}")


def _end(processes: list["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
