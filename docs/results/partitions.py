"""Writes docs/results/partitions.csv and partitions.md: how partitions divide real datasets.

COTERIE_DATA=… python docs/results/partitions.py
"""

import csv
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data import (
    PARTITIONS,
    Dataset,
    Federation,
    describe,
    emd,
    federate,
    load,
)
from coterie.errors import CoterieError

SEED = 0
NAMES = ("mnist", "cifar10", "cifar100", "femnist")
SHOWN = "cifar10"  # the dataset that the page shows
COLUMNS = ("dataset", "partition", "clients", "samples", "classes", "emd_p1", "l1", "fingerprint")
# Every partition with the papers' parameters; (name, fields).
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("iid", {"clients": 15}),
    ("pathological", {"clients": 15}),
    ("pathological", {"clients": 100}),
    ("latent", {"clients": 20, "distributions": 10}),
    ("practical_groups", {}),
    *(("waffle", {"distribution": d}) for d in ("A", "B", "C", "A*", "B*")),
    ("waffle", {"distribution": "A", "sizes": "B"}),
    ("waffle", {"distribution": "C", "sizes": "B"}),
    *(("label_groups", {"clients": 8, "groups": g}) for g in (2, 3, 4)),
    ("concept_shift", {}),
    ("dirichlet", {"clients": 100, "alpha": 0.9}),
    ("dirichlet_clusters", {"clients": 10}),
    ("natural", {}),
)


def main() -> None:
    """Write the page and the table."""
    rows = [[name, *row] for name in NAMES for row in partitions(name)]
    table = Path(__file__).with_name("partitions.csv")
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    page = table.with_suffix(".md")
    page.write_text("\n".join(lines([row for row in rows if row[0] == SHOWN])) + "\n", "utf-8")


def partitions(name: str) -> Iterator[list[str]]:
    """One row for each partition that applies to a dataset."""
    dataset = load(name)
    for kind, given in CASES:
        federation = attempt(dataset, kind, given)
        if federation:
            shown = " ".join([kind, *(f"{field}={value}" for field, value in given.items())])
            yield [shown, *summary(federation)]


def lines(rows: list[list[str]]) -> Iterator[str]:
    """The page, line by line."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    yield "# What every partition makes of the real datasets"
    yield ""
    yield (
        "CIFAR-10 is below; `partitions.csv` has MNIST, CIFAR-100 and FEMNIST too, and all "
        f"fingerprints. Command `python docs/results/partitions.py` with `COTERIE_DATA` set, "
        f"commit {commit}, seed {SEED}, {platform.machine()} {platform.system()}, Python "
        f"{platform.python_version()}. Samples and classes are those of a client's training and "
        "validation data; `emd_p1` is P1's earth mover's distance (reading P1-12), `l1` the plain "
        "one. `latent` with as many distributions as classes needs no embedding network."
    )
    yield ""
    yield f"| {' | '.join(COLUMNS[1:-1])} |"
    yield f"|{' --- |' * len(COLUMNS[1:-1])}"
    for _, partition, *numbers, _ in rows:
        yield f"| `{partition}` | {' | '.join(numbers)} |"


def attempt(dataset: Dataset, name: str, fields: dict[str, Any]) -> Federation | None:
    """The federation, or None where a partition does not apply to a dataset."""
    if name == "latent" and dataset.classes != 10:
        return None
    try:
        return federate(dataset, PARTITIONS[name](**fields), seed=SEED)
    except CoterieError:
        return None


def summary(federation: Federation) -> list[str]:
    """The numbers of one row."""
    rows, apart = describe(federation), emd(federation)
    assert apart is not None
    sizes = [row.train + row.val for row in rows]
    held = [int(np.count_nonzero(row.classes)) for row in rows]
    distances = (f"{apart.emd_p1:.3f}", f"{apart.l1:.3f}")
    return [str(len(rows)), span(sizes), span(held), *distances, federation.fingerprint]


def span(values: list[int]) -> str:
    """Smallest and largest."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


if __name__ == "__main__":
    main()
