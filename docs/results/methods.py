"""Write a comparison as a table in Markdown.

python docs/results/methods.py OUT/comparison.json
"""

import json
import sys
from pathlib import Path

from coterie.views.words import label


def main(path: str) -> None:
    """Print the methods of one comparison, best mean first."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    print("| method | mean | worst tenth | over Local | worse off | in group |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in sorted(found["methods"], key=lambda row: -row["mean"]["mean"]):
        inside = row["in_group_weight"]["mean"]
        known = isinstance(inside, float)
        cells = [
            label(row["method"]),
            _spread(row["mean"]),
            _spread(row["worst_tenth"]),
            f"{row['relative_to_local']['mean']:+.1f}",
            f"{row['worse']} of {row['compared']}",
            f"{100 * inside:.0f} %" if known else "–",
        ]
        print(f"| {' | '.join(cells)} |")


def _spread(value: dict[str, float]) -> str:
    return f"{value['mean']:.1f} ± {value['deviation']:.1f}"


if __name__ == "__main__":
    main(sys.argv[1])
