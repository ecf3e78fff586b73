"""Write a comparison as a table in Markdown.

python docs/results/methods.py OUT/comparison.json
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from coterie.views.words import label


def main(path: str) -> None:
    """Print the methods of one comparison, best mean rank first."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    rank = _ranks(Path(path).parent, found["runs"])
    compared = found["methods"][0]["compared"]
    heads = "| method | mean rank | mean | worst tenth | over Local"
    print(f"{heads} | worse off, of {compared} | in group, % |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in sorted(found["methods"], key=lambda row: rank[row["method"]]):
        inside = row["in_group_weight"]["mean"]
        known = isinstance(inside, float)
        cells = [
            label(row["method"]),
            f"{rank[row['method']]:.1f}",
            _spread(row["mean"]),
            _spread(row["worst_tenth"]),
            f"{row['relative_to_local']['mean']:+.1f}",
            str(row["worse"]),
            f"{100 * inside:.0f}" if known else "–",
        ]
        print(f"| {' | '.join(cells)} |")


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
    main(sys.argv[1])
