"""Write the arena's table of numbers, and its tables in Markdown.

python docs/results/arena.py OUT/records > docs/results/arena.csv
python docs/results/arena.py docs/results/arena.csv
"""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from coterie.algorithms import ALGORITHMS, ALIASES
from coterie.studies.records import record_for, record_of
from coterie.studies.reproducing import reproduction
from coterie.views.words import label

LOOKED = (
    *("digits", "half participation", "practical", "IID", "Dirichlet", "CIFAR 2", "table", "two"),
    "MNIST A",
)
CIRCLE, LOCAL, CLOSE = "circle", "local", 0.5
Scores = dict[str, dict[str, float]]  # by column and method, the mean over seeds


def numbers(folder: Path) -> None:
    """One line per run: its mean, and how many clients are below Local by two standard errors."""
    known = {
        one.key: one
        for path in sorted(folder.glob("*.json"))
        for one in [record_of(json.loads(path.read_text("utf-8")), path)]
    }
    write = csv.writer(sys.stdout, lineterminator="\n")
    write.writerow(["column", "method", "seed", "mean", "worse", "clients"])
    cells = {(c.column.name, c.method.label, c.seed): record_for(c, known) for c in _cells()}
    for (column, method, seed), found in cells.items():
        alone = cells.get((column, LOCAL, seed))
        if found is not None and alone is not None:
            a, b = (np.array(one.last, float) / 100 for one in (found, alone))
            error = np.sqrt((a * (1 - a) + b * (1 - b)) / np.array(found.n_test))
            row = [f"{100 * a.mean():.3f}", int((b - a > 2 * error).sum()), len(a)]
            write.writerow([column, method, seed, *row])


def _cells() -> Iterable:
    return reproduction("arena", "small").study.cells()


def tables(path: Path) -> None:
    """Ranks over both halves, every setting, and the ablation."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    every: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        every.setdefault(row["column"], {}).setdefault(row["method"], []).append(float(row["mean"]))
    scores = {c: {m: float(np.mean(v)) for m, v in of.items()} for c, of in every.items()}
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if "@" not in m]
    whole = [c for c, of in scores.items() if {*methods} <= {*of}]
    _ranking(scores, methods, whole, [row for row in rows if row["column"] in whole])
    _settings(scores, methods)
    _ablation(scores)


def _ranking(
    scores: Scores, methods: list[str], whole: list[str], rows: list[dict[str, str]]
) -> None:
    of = {c: [scores[c][m] for m in methods] for c in whole}
    ranks = {c: dict(zip(methods, rankdata(np.negative(v)), strict=True)) for c, v in of.items()}
    halves = [c for c in whole if c in LOOKED], [c for c in whole if c not in LOOKED]
    clients = sum(int(row["clients"]) for row in rows if row["method"] == LOCAL)
    heads = f"mean rank | looked at ({len(halves[0])}) | not looked at ({len(halves[1])})"
    heads += f" | within {CLOSE} of the best | largest loss | mean loss | worse than alone"
    print(f"| method | {heads}, of {clients} |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    for m in sorted(methods, key=lambda m: np.mean([ranks[c][m] for c in whole])):
        loss = {c: max(of[c]) - scores[c][m] for c in whole}
        most = max(loss, key=lambda c: loss[c])
        cells = [_mean([ranks[c][m] for c in some]) for some in (whole, *halves)]
        near = sum(value <= CLOSE for value in loss.values())
        worse = sum(int(row["worse"]) for row in rows if row["method"] == m)
        cells += [f"{near} of {len(whole)}", f"{loss[most]:.1f} ({most})", _mean([*loss.values()])]
        print(f"| {_shown(m)} | {' | '.join(cells)} | {worse} |")
    print()


def _settings(scores: Scores, methods: list[str]) -> None:
    print("| setting | looked at | circle | best | FedAvg | Local | circle's loss | methods |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for column, of in scores.items():
        known = {m: of[m] for m in methods if m in of}
        best = max((m for m in known if m != CIRCLE), key=lambda m: known[m])
        shown = [f"{known[m]:.1f}" if m in known else "–" for m in ("fedavg", LOCAL)]
        loss = known[best] - known[CIRCLE]
        seen = "yes" if column in LOOKED else "no"
        cells = [seen, f"{known[CIRCLE]:.1f}", f"{_shown(best)} {known[best]:.1f}", *shown]
        print(f"| {column} | {' | '.join(cells)} | {max(0.0, loss):.1f} | {len(known)} |")
    print()


def _ablation(scores: Scores) -> None:
    variants = [m for m in dict.fromkeys(m for of in scores.values() for m in of) if "@" in m]
    columns = [c for c, of in scores.items() if any(v in of for v in variants)]
    print(f"| without | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    print(f"| circle | {' | '.join(f'{scores[c][CIRCLE]:.1f}' for c in columns)} |")
    for v in variants:
        gaps = [
            f"{scores[c][v] - scores[c][CIRCLE]:+.1f}" if v in scores[c] else "" for c in columns
        ]
        print(f"| {v} | {' | '.join(gaps)} |")


def _shown(method: str) -> str:
    """The name of a method; one that is gone is shown as it is."""
    return label(method) if {method} & {*ALGORITHMS, *ALIASES} else method


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f}" if len(values) else "–"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if place.is_dir():
        numbers(place)
    else:
        tables(place)
