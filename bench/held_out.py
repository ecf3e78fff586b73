"""Do methods find the right collaborators on federations that nobody tuned for?

    python bench/held_out.py --half seen        # to look at, as often as needed
    python bench/held_out.py --half held_out    # to look at once

Every number draws a federation: a table of 12 sites of 40 to 130 rows, whose outcome depends on a
hidden concept; digits whose labels are swapped by group; or digits in groups of classes; the images
at 5 to 60 clients. ``--kinds`` takes others in turn: digits of which a client has two classes
(pairs), or dealt evenly (even), at 5 to 40 clients. A coin of its own number puts a federation into
one of the halves.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import coterie
from coterie.runs import collaboration

KINDS = ("table", "swapped", "classes")
PARTITIONS = {
    "swapped": "concept_shift",
    "classes": "label_groups",
    "pairs": "pathological",
    "even": "iid",
}
HALVES = ("seen", "held_out")
METHODS = ["fedavg", "fedfomo", "federico", "fedamp", "heurfedamp"]


def half_of(number: int, kinds: Sequence[str]) -> str:
    """The half that a federation belongs to."""
    return HALVES[int(np.random.default_rng([9, number // len(kinds)]).integers(2))]


def table(rng: np.random.Generator, home: Path) -> tuple[dict[str, Any], Any]:
    """A table of sites in hidden groups, each with a linear rule of its own, and their groups."""
    groups, features, classes = (int(rng.integers(*ends)) for ends in ((2, 5), (8, 25), (2, 5)))
    rules = rng.normal(size=(groups, features, classes))
    of = rng.permutation(np.arange(12) % groups)
    lines = ["site," + ",".join(f"f{j}" for j in range(features)) + ",outcome"]
    for site, group in enumerate(of):
        x = rng.normal(size=(int(rng.integers(40, 131)), features))
        y = (x @ rules[group] + 0.5 * rng.normal(size=(len(x), classes))).argmax(1)
        for row, c in zip(x, y, strict=True):
            lines.append(f"s{site}," + ",".join(f"{v:.4f}" for v in row) + f",c{c}")
    (home / "sites.csv").write_text("\n".join(lines) + "\n")
    data = {"name": str(home / "sites.csv"), "client": "site", "target": "outcome"}
    return {"data": data, "run": {"rounds": 30}}, of


def digits(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """Digits of clients in groups or without."""
    partition: dict[str, Any] = {"name": PARTITIONS[kind]}
    if kind in KINDS:
        clients, groups = int(rng.integers(5, 61)), int(rng.integers(2, 5))
        partition |= {"clients": clients, "groups": min(groups, clients // 2)}
    else:
        partition |= {"clients": int(rng.integers(5, 41))}
        partition |= {"per_client": 2} if kind == "pairs" else {}
    train = {"lr": 0.1, "batch": 10, "epochs": 2}
    return {
        "data": {"name": "digits", "test": 0.4},
        "partition": partition,
        "model": {"name": "mlp"},
        "train": train,
        "run": {"rounds": 15},
    }


def drawn(number: int, kind: str, home: Path) -> tuple[dict[str, Any], Any]:
    """The config of a federation, and its groups where the partition does not know them."""
    rng = np.random.default_rng([1, number])
    return table(rng, home) if kind == "table" else (digits(rng, kind), None)


def judged(number: int, kind: str, methods: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    """Mean accuracy of every method, and its share of weight in the right group if there is one."""
    with tempfile.TemporaryDirectory() as home:
        config, groups = drawn(number, kind, Path(home))
        config["run"] |= {"seed": number, "evaluate_every": config["run"]["rounds"]}
        config["algorithm"] = fields
        config["engine"] = {"name": "vmap", "threads": 1, "trace": False}
        runs = coterie.compare(config, methods=methods).runs
    found = {}
    for run in runs:
        truth = run.roster.groups if groups is None else groups
        kin = collaboration.kinship(run.weights, run.swaps)
        known = kin is not None and truth is not None
        share = collaboration.in_group_weight(kin, truth) if known else None
        found[run.method] = (run.summary["accuracy_last"], share)
    return found


def main() -> None:
    """A line for each federation, then the means."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=HALVES, default="seen")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--upto", type=int, default=24)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--fields", type=json.loads, default={})
    asked = parser.parse_args()
    kinds = asked.kinds.split(",")
    for number in range(asked.start, asked.upto):
        if half_of(number, kinds) == asked.half:
            kind = kinds[number % len(kinds)]
            found = judged(number, kind, asked.methods.split(","), asked.fields)
            line = "  ".join(
                f"{name} {value:.1f}" + (f" ({share:.2f})" if share is not None else "")
                for name, (value, share) in found.items()
            )
            print(f"{number:3} {kind:8} {line}", flush=True)


if __name__ == "__main__":
    main()
