"""Methods at several rates on pixels from 0 to 1 and on standardised ones, for docs/data.md.

    COTERIE_DATA=... python bench/pixel_scale.py digits|mnist|fashion_mnist [SEEDS [METHODS]]

``mnist`` and ``fashion_mnist`` are the first 3,000 training and 2,000 test images of each. Every
cell is the mean test accuracy in the last round, over clients and seeds; "!" marks cells of which
a run raised the alarm ``diverged``.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import coterie
from coterie.data import load

RATES = (0.02, 0.05, 0.1, 0.2)
METHODS = ["local", "fedavg", "fedavg_ft", "scaffold", "waffle", "erosion", "fedfomo", "fedamp",
           "heurfedamp", "ditto", "fedem", "cfl"]  # fmt: skip
SETTINGS = {
    "digits": {
        "data.test": 0.5,
        "partition.name": "concept_shift",
        "partition.clients": 12,
        "partition.groups": 3,
        "model.name": "mlp",
        "train.epochs": 2,
        "train.batch": 10,
        "run.rounds": 20,
    },
    "mnist": {
        "partition.name": "waffle",
        "partition.distribution": "B",
        "model.name": "lenet5",
        "train.epochs": 2,
        "train.batch": 10,
        "run.rounds": 20,
        "algorithm.waffle.requesters": [0, 3, 6],
        "algorithm.erosion.requesters": [0, 3, 6],
    },
    "fashion_mnist": {
        "partition.name": "practical_groups",
        "partition.table": [
            {"clients": 3, "classes": [0, 1, 2], "train": 240, "test": 50},
            {"clients": 3, "classes": [3, 4, 5], "train": 200, "test": 50},
            {"clients": 4, "classes": [6, 7, 8, 9], "train": 160, "test": 50},
        ],
        "model.name": "mlp",
        "train.epochs": 2,
        "train.batch": 10,
        "run.rounds": 20,
    },
}


def subset(name: str, folder: Path) -> str:
    """A file with the first images of a dataset; the name of the dataset where it is small."""
    if name == "digits":
        return name
    data = load(name)
    train, test = (data.fixed == 0).nonzero()[:3000, 0], (data.fixed == 2).nonzero()[:2000, 0]
    arrays = {
        f"{kind}_{part}": getattr(data, kind)[rows].numpy()
        for kind in "xy"
        for part, rows in (("train", train), ("test", test))
    }
    np.savez(folder / f"{name}.npz", **arrays)
    return str(folder / f"{name}.npz")


def main(name: str, seeds: int, methods: list[str]) -> None:
    """Run everything and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        common = SETTINGS[name] | {"data.name": subset(name, Path(folder))}
        common |= {"train.merge_val": False, "run.seeds": seeds, "run.methods": methods}
        common |= {"engine.name": "vmap", "run.evaluate_every": 5}
        cells: dict[str, list[str]] = {method: [] for method in methods}
        for scale in ("unit", "standard"):
            for rate in RATES:
                chosen = {"data.scale": scale, "train.lr": rate}
                for row in coterie.compare(set=common | chosen).rows:
                    wild = any(alarm.code == "diverged" for alarm in row.alarms)
                    cells[row.method].append(f"{row.mean.mean:.1f}{'!' * wild}")
                print(scale, rate, {m: c[-1] for m, c in cells.items()}, file=sys.stderr)
    print("| method |", " | ".join(f"{s} {r}" for s in ("unit", "standard") for r in RATES), "|")
    for method, row in cells.items():
        print(f"| {method} |", " | ".join(row), "|")


if __name__ == "__main__":
    chosen = sys.argv[3].split(",") if len(sys.argv) > 3 else METHODS
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1, chosen)
