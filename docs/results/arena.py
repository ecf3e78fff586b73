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
    """Ranks over both halves, every setting, and the ablation."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    scores: Scores = {}
    for row in rows:
        of = scores.setdefault(row["column"], {}).setdefault(row["method"], {})
        of[int(row["seed"])] = float(row["mean"])
    first = {c: {m: seeds[0] for m, seeds in of.items() if 0 in seeds} for c, of in scores.items()}
    methods = [m for m in dict.fromkeys(r["method"] for r in rows) if "@" not in m]
    whole = [c for c, of in first.items() if {*methods} <= {*of}]
    _ranking(first, methods, whole, [r for r in rows if r["column"] in whole and r["seed"] == "0"])
    _settings(scores, methods)
    _ablation(scores)


def _ranking(
    scores: dict[str, dict[str, float]],
    methods: list[str],
    whole: list[str],
    rows: list[dict[str, str]],
) -> None:
    """Seed 0, in the settings in which all methods were run."""
    of = {c: [scores[c][m] for m in methods] for c in whole}
    ranks = {c: dict(zip(methods, rankdata(np.negative(v)), strict=True)) for c, v in of.items()}
    halves = [c for c in whole if c in LOOKED], [c for c in whole if c not in LOOKED]
    clients = sum(int(row["clients"]) for row in rows if row["method"] == LOCAL)
    heads = f"mean rank | first half ({len(halves[0])}) | second half ({len(halves[1])})"
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
    """Seed 0, in which all were run, and circle's lead over Local in all its seeds."""
    print("| setting | half | circle | best other | FedAvg | Local | loss | over Local, by seed |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | --- |")
    for column, of in scores.items():
        known = {m: of[m][0] for m in methods if 0 in of.get(m, {})}
        if CIRCLE not in known:
            continue
        best = max((m for m in known if m != CIRCLE), key=lambda m: known[m])
        loss = max(0.0, known[best] - known[CIRCLE])
        cells = ["first" if column in LOOKED else "second", f"{known[CIRCLE]:.1f}"]
        cells += [f"{_shown(best)} {known[best]:.1f}"]
        cells += [f"{known[m]:.1f}" for m in ("fedavg", LOCAL)] + [f"{loss:.1f}"]
        lead = {s: v - of[LOCAL][s] for s, v in sorted(of[CIRCLE].items()) if s in of[LOCAL]}
        cells.append(", ".join(f"{value:+.1f}" for value in lead.values()))
        print(f"| {column} | {' | '.join(cells)} |")
    print()


def _ablation(scores: Scores) -> None:
    variants = [m for m in dict.fromkeys(m for of in scores.values() for m in of) if "@" in m]
    columns = [c for c, of in scores.items() if any(v in of for v in variants)]
    print(f"| without | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    print(f"| circle | {' | '.join(f'{scores[c][CIRCLE][0]:.1f}' for c in columns)} |")
    for v in variants:
        gaps = [
            f"{scores[c][v][0] - scores[c][CIRCLE][0]:+.1f}" if v in scores[c] else ""
            for c in columns
        ]
        print(f"| {v} | {' | '.join(gaps)} |")


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
