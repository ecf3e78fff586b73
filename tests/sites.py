"""Federations of sites in one process: real folders, real messages, no network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import coterie
from coterie.deploy.federated import Federated, federated
from coterie.deploy.folders import FederationFolder
from coterie.deploy.handler import SiteHandler
from coterie.deploy.holdings import Holdings
from coterie.deploy.protocol import Signed
from coterie.deploy.site_folder import SiteFolder
from coterie.engines.remote import SiteState
from coterie.runs.config.loading import load
from coterie.runs.execute import run_cell
from coterie.runs.plan import Plan

NAMES = ("ash", "birch", "cedar")
FAST = {
    "model": {"name": "mlp", "hidden": [6]},
    "train": {"lr": 0.1, "epochs": 1, "batch": 8},
    "run": {"rounds": 3},
}


def write_tables(folder: Path, *, rows: tuple[int, ...] = (60, 47, 80), seed: int = 0) -> Path:
    """One CSV file per site: two numbers, one of them with gaps, a category and a class."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(seed)
    for at, (name, count) in enumerate(zip(NAMES, rows, strict=True)):
        a, b = draws.normal(size=(2, count))
        kind = draws.choice(["x", "y", "z"][: 2 + at % 2], size=count)
        sign = -1 if at == 1 else 1
        label = np.where(sign * a + 0.3 * b + 0.3 * draws.normal(size=count) > 0, "ill", "well")
        missing = draws.random(count) < 0.1 * (at == 2)
        lines = ["a,b,kind,label"]
        lines += [
            f"{x:.4f},{'' if m else f'{y:.4f}'},{k},{t}"
            for x, y, m, k, t in zip(a, b, missing, kind, label, strict=True)
        ]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def site_folders(
    home: Path,
    data: Path,
    consent: tuple[str, ...] = ("shown", "scores"),
    address: str = "localhost:9092",
) -> dict[str, SiteFolder]:
    """A federation's folder ``home/fed``, and an admitted site's folder for each CSV file."""
    fed = FederationFolder.create(home / "fed", address)
    made = {}
    for path in sorted(data.glob("*.csv")):
        name = path.stem
        folder = SiteFolder.create(home / name, fed.invite, name)
        text = (home / name / "site.toml").read_text()
        table = f'[data]\nname = "{path}"\ntarget = "label"\n'
        text = text.replace("[data]\n", table)
        text = text.replace("automatic = []", 'automatic = ["*"]')
        text = text.replace("experiments = 50 ", "experiments = 100000 ")
        text = text.replace("\n[levels]\n", '\n[levels]\nkind = "named"\nlabel = "named"\n')
        for word in consent:
            text = text.replace(f"{word} = false", f"{word} = true")
        (home / name / "site.toml").write_text(text)
        fed.add_site(folder.public, name)
        made[name] = SiteFolder.open(home / name)
    return made


def handler_of(folder: SiteFolder) -> SiteHandler:
    assert folder.data.name is not None
    return SiteHandler(folder, Holdings(folder, folder.data.name, folder.data.options))


class InProcess:
    """A transport that calls the sites' handlers; ``spoil`` may change or lose an answer."""

    def __init__(self, handlers: Mapping[str, Any], spoil: Any = None) -> None:
        self.handlers, self.spoil = dict(handlers), spoil
        self.asked: list[tuple[str, int]] = []
        self.bytes_down = self.bytes_up = 0

    def ask(self, requests: Mapping[str, bytes], round: int) -> dict[str, bytes | str]:
        found: dict[str, bytes | str] = {}
        for name, data in requests.items():
            self.asked.append((name, round))
            answer = self.handlers[name].answer(data)
            self.bytes_down += len(data)
            self.bytes_up += len(answer)
            found[name] = answer if self.spoil is None else self.spoil(name, round, answer)
        return found

    def sites(self) -> dict[str, SiteState]:
        return {name: SiteState(True, 0.0) for name in self.handlers}

    def close(self) -> None:
        self.handlers = {}  # nobody can be asked any more


def setting_of(tables: Mapping[str, Any], transport: InProcess) -> Federated:
    asked = load(tables, {"run.federation": "fed"})
    return federated(asked, signed(transport), "in_process", "fed")


def signed(transport: InProcess) -> Signed:
    """The transport as an operator's, with the key of the folder beside the sites'."""
    home = next(iter(transport.handlers.values()))._folder.path.parent
    return Signed(transport, FederationFolder.open(home / "fed").operator_key(), "fed")


def executed(setting: Federated, out: Path | None = None) -> Any:
    """The run of a setting's own method and seed."""
    return run_cell(setting, Plan.single(setting.config, out).cells[0])


def exported(folders: Mapping[str, SiteFolder], place: Path) -> Path:
    """A folder with every site's data as the site divided it."""
    place.mkdir(exist_ok=True)
    for name, folder in folders.items():
        assert folder.data.name is not None
        Holdings(folder, folder.data.name, folder.data.options).export(place / name)
    return place


def simulated(place: Path, asked: Any, **options: Any) -> Any:
    """The run of a simulation of exported sites."""
    said = {"data.target": "label", "data.split": "part"}
    return coterie.run(asked, data=str(place), engine="loop", set=said, **options)
