"""A whole federation on this machine: a coordinator and sites as processes, over loopback."""

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..core.shards import SPLITS
from ..data.federation import Federation
from ..errors import EngineError
from .folders import FederationFolder
from .site_folder import SiteFolder
from .transports import end_of

PATIENCE = 180.0  # seconds until all sites must be online


def write_client(path: Path, federation: Federation, client: int) -> None:
    """Write one client's samples with the labels that the client gives them, already divided."""
    data = federation.dataset if federation.source is None else federation.source
    arrays = {"class_names": np.array(data.class_names, dtype=str)} if data.class_names else {}
    splits = (federation.train, federation.val, federation.test)
    for name, split in zip(SPLITS, splits, strict=True):
        mine = split[client]
        y = data.y[mine]
        if federation.relabel is not None:
            y = federation.relabel[client, y]
        if len(mine):
            x = data.x[mine]
            arrays |= {f"x_{name}": x.numpy(), f"y_{name}": y.numpy()}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def site_name(client: str) -> str:
    """The name of a client as a site may be called."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", client)[:40]


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def make_folders(home: Path, federation: Federation, transport: str) -> list[SiteFolder]:
    """Make the folders of a federation and of one site per client, with the clients' data."""
    fed = FederationFolder.create(home / "fed", f"localhost:{free_port()}", transport)
    made = []
    for client, called in enumerate(federation.clients):
        name = site_name(called)
        site = SiteFolder.create(home / name, fed.invite, name)
        data = site.path / f"{federation.dataset.name}.npz"
        write_client(data, federation, client)
        text = (site.path / "site.toml").read_text(encoding="utf-8")
        text = text.replace("[data]\n", f'[data]\nname = "{data.name}"\n')
        text = text.replace("shown = false", "shown = true")
        text = text.replace("automatic = []", 'automatic = ["*"]')
        (site.path / "site.toml").write_text(text, encoding="utf-8")
        fed.add_site(site.public, name)
        made.append(SiteFolder.open(site.path))
    return made


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
            transport = end_of(fed.transport, "connect")(fed)
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
