"""Write comparisons of the same methods as one table in Markdown.

python docs/results/methods.py DIGITS/comparison.json FASHION/comparison.json
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from coterie.views.words import label

Row = dict[str, Any]


def main(paths: list[str]) -> None:
    """Print the methods of all comparisons, best mean rank first."""
    found = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    tables = [{row["method"]: row for row in one["methods"]} for one in found]
    ranks = [_ranks(Path(path).parent, one["runs"]) for path, one in zip(paths, found, strict=True)]
    mean = {name: float(np.mean([rank[name] for rank in ranks])) for name in ranks[0]}
    heads = ["method", "mean rank"]
    for one in tables:
        compared = next(iter(one.values()))["compared"]
        heads += ["rank", "mean", "worst tenth", "over Local", f"worse, of {compared}", "in group"]
    print(f"| {' | '.join(heads)} |")
    print(f"| --- {'| ---: ' * (len(heads) - 1)}|")
    for name in sorted(mean, key=mean.__getitem__):
        cells = [label(name), f"{mean[name]:.1f}"]
        for one, rank in zip(tables, ranks, strict=True):
            cells += [f"{rank[name]:.1f}", *_cells(one[name])]
        print(f"| {' | '.join(cells)} |")


def _cells(row: Row) -> list[str]:
    inside = row["in_group_weight"]["mean"]
    return [
        _spread(row["mean"]),
        _spread(row["worst_tenth"]),
        f"{row['relative_to_local']['mean']:+.1f}",
        str(row["worse"]),
        f"{100 * inside:.0f}" if isinstance(inside, float) else "–",
    ]


def _ranks(folder: Path, runs: list[dict[str, str]]) -> dict[str, float]:
    """The mean over seeds of each method's rank by its mean score; equal scores share a rank."""
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        summary = json.loads((folder / run["path"] / "summary.json").read_text(encoding="utf-8"))
        scores[run["seed"]][run["method"]] = summary["accuracy_last"]
    names = list(next(iter(scores.values())))
    ranks = [rankdata([-of[name] for name in names]) for of in scores.values()]
    return dict(zip(names, np.mean(ranks, axis=0), strict=True))


def _spread(value: dict[str, float]) -> str:
    return f"{value['mean']:.1f} ± {value['deviation']:.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
