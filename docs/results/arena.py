"""Write the arena's table of numbers, and its tables in Markdown.

python docs/results/arena.py docs/results/arena.csv OUT/records > NEW.csv
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
BEFORE = "circle@last"  # what the other variants leave their ingredient out of
Scores = dict[str, dict[str, dict[int, float]]]  # by column, method and seed


def numbers(path: Path, folder: Path) -> None:
    """One line per run: its mean, and how many clients are below Local by two standard errors.

    Runs that are not in the folder keep their line of the table.
    """
    known = {
        one.key: one
        for path in sorted(folder.glob("*.json"))
        for one in [record_of(json.loads(path.read_text("utf-8")), path)]
    }
    rows = {tuple(row[:3]): row[3:] for row in csv.reader(path.open(encoding="utf-8"))}
    cells = {(c.column.name, c.method.label, c.seed): record_for(c, known) for c in _cells()}
    for (column, method, seed), found in cells.items():
        alone = cells.get((column, LOCAL, seed))
        if found is not None and alone is not None:
            a, b = (np.array(one.last, float) / 100 for one in (found, alone))
            error = np.sqrt((a * (1 - a) + b * (1 - b)) / np.array(found.n_test))
            worse = str(int((b - a > 2 * error).sum()))
            rows[column, method, str(seed)] = [f"{100 * a.mean():.3f}", worse, str(len(a))]
    csv.writer(sys.stdout, lineterminator="\n").writerows([*key, *rows[key]] for key in rows)


def _cells() -> Iterable:
    return reproduction("arena", "small").study.cells()


def tables(path: Path) -> None:
    """Ranks over both halves, every setting, and the ablation: means over seeds."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    scores: Scores = {}
    for row in rows:
        of = scores.setdefault(row["column"], {}).setdefault(row["method"], {})
        of[int(row["seed"])] = float(row["mean"])
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if "@" not in m]
    seeds = {c: _seeds(of, methods) for c, of in scores.items()}
    whole = [c for c, found in seeds.items() if found]
    used = [r for r in rows if int(r["seed"]) in seeds[r["column"]]]
    _ranking({c: _means(scores[c], methods, seeds[c]) for c in whole}, used)
    _settings(scores, methods, seeds)
    _ablation(scores)


def _seeds(of: dict[str, dict[int, float]], methods: Iterable[str]) -> list[int]:
    """The seeds with which all of some methods were run."""
    return sorted(set.intersection(*({*of.get(m, {})} for m in methods)))


def _means(
    of: dict[str, dict[int, float]], methods: Iterable[str], seeds: Iterable[int]
) -> dict[str, float]:
    return {m: float(np.mean([of[m][s] for s in seeds])) for m in methods}


def _ranking(scores: dict[str, dict[str, float]], rows: list[dict[str, str]]) -> None:
    """The settings in which all methods were run."""
    ranks = {
        c: dict(zip(of, rankdata([-v for v in of.values()]), strict=True))
        for c, of in scores.items()
    }
    halves = [c for c in scores if c in LOOKED], [c for c in scores if c not in LOOKED]
    clients = sum(int(row["clients"]) for row in rows if row["method"] == LOCAL)
    heads = f"mean rank | first half ({len(halves[0])}) | second half ({len(halves[1])})"
    heads += f" | within {CLOSE} of the best | largest loss | mean loss | worse than alone"
    print(f"| method | {heads}, of {clients} |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    methods = next(iter(scores.values()))
    for m in sorted(methods, key=lambda m: np.mean([ranks[c][m] for c in scores])):
        loss = {c: max(of.values()) - of[m] for c, of in scores.items()}
        most = max(loss, key=lambda c: loss[c])
        cells = [_mean([ranks[c][m] for c in some]) for some in (scores, *halves)]
        near = sum(value <= CLOSE for value in loss.values())
        worse = sum(int(row["worse"]) for row in rows if row["method"] == m)
        cells += [f"{near} of {len(scores)}", f"{loss[most]:.1f} ({most})", _mean([*loss.values()])]
        print(f"| {_shown(m)} | {' | '.join(cells)} | {worse} |")
    print()


def _settings(scores: Scores, methods: list[str], seeds: dict[str, list[int]]) -> None:
    """Circle, the best of the others, and circle's lead over Local in each seed."""
    print("| setting | half | seeds | circle | best other | FedAvg | Local | loss | over Local |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | --- |")
    for column, found in seeds.items():
        if not found:
            continue
        of = scores[column]
        known = _means(of, methods, found)
        best = max((m for m in known if m != CIRCLE), key=lambda m: known[m])
        loss = max(0.0, known[best] - known[CIRCLE])
        cells = ["first" if column in LOOKED else "second", str(len(found))]
        cells += [f"{known[CIRCLE]:.1f}", f"{_shown(best)} {known[best]:.1f}"]
        cells += [f"{known[m]:.1f}" for m in ("fedavg", LOCAL)] + [f"{loss:.1f}"]
        cells.append(", ".join(f"{of[CIRCLE][s] - of[LOCAL][s]:+.1f}" for s in found))
        print(f"| {column} | {' | '.join(cells)} |")
    print()


def _ablation(scores: Scores) -> None:
    """Circle, and each variant of its form before, against that form."""
    variants = [m for m in dict.fromkeys(m for of in scores.values() for m in of) if "@" in m]
    columns = [c for c, of in scores.items() if BEFORE in of]
    print(f"| change | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    for v in [CIRCLE, *(v for v in variants if v != BEFORE)]:
        gaps = [
            f"{np.mean([at - scores[c][BEFORE][s] for s, at in scores[c][v].items()]):+.1f}"
            if v in scores[c]
            else ""
            for c in columns
        ]
        print(f"| {v.partition('@')[2] or v} | {' | '.join(gaps)} |")


def _shown(method: str) -> str:
    """The name of a method; one that is gone is shown as it is."""
    return label(method) if {method} & {*ALGORITHMS, *ALIASES} else method


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f}" if len(values) else "–"


if __name__ == "__main__":
    table, *records = map(Path, sys.argv[1:])
    if records:
        numbers(table, *records)
    else:
        tables(table)
