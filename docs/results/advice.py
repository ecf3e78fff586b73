"""How often is `coterie advise` right? Probes of federations whose right answer is measured.

    python docs/results/advice.py truth OUT      # full comparisons: the right answers
    python docs/results/advice.py probes OUT     # the probes of every federation and repeat
    python docs/results/advice.py tables OUT     # the tables of advice.md from both

OUT is a folder; a run that is finished there is read again. The right answer of a federation is
what a full-length comparison with several methods of every kind finds: the simplest kind whose best
method is within MARGIN points of the best of all, on the mean over clients and seeds. Its seeds are
others than those of the probes.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import coterie
from coterie.advising.advice import KINDS, MARGIN, conclude, probe_config

BASE: dict[str, Any] = {
    "data": {"name": "digits", "test": 0.5},
    "model": {"name": "mlp"},
    "train": {"lr": 0.2, "epochs": 2, "batch": 10},
    "engine": {"name": "vmap"},
    "run": {"rounds": 40},
}
FEDERATIONS: dict[str, dict[str, Any]] = {
    "alike": {"partition": {"name": "iid", "clients": 8}},
    "contradicting": {"partition": {"name": "concept_shift", "clients": 8, "groups": 8}},
    "hidden groups": {"partition": {"name": "concept_shift", "clients": 12, "groups": 3}},
    "label skew": {
        "partition": {"name": "pathological", "clients": 50, "per_client": 4},
        "train": {"lr": 0.1, "epochs": 5, "batch": 10},
    },
    "tiny sites": {"partition": {"name": "iid", "clients": 40}},
    "mild skew": {"partition": {"name": "dirichlet", "clients": 20, "alpha": 0.1}},
}
EXPECTED = {  # said before anything was measured
    "alike": ("average",),
    "contradicting": ("stay local",),
    "hidden groups": ("cluster", "personalise"),
    "label skew": ("personalise",),
    "tiny sites": ("average",),
    "mild skew": ("personalise",),  # not one of the five: see advice.md
}
ROUNDS, SEEDS = 40, (100, 101, 102)  # of the full comparisons
METHODS = ["local", "fedavg", "ifca", "cfl", "fedavg_ft", "fedamp", "fedfomo", "ditto"]
REPEATS = 6  # probes of each federation
FRESH = 4  # from this repeat on the rule was fixed before the probe was run
EACH = 3  # seeds of each probe


def config(name: str) -> dict[str, Any]:
    """The config of one federation."""
    return {**BASE, **FEDERATIONS[name]}


def folder(out: Path, *parts: object) -> Path:
    """The folder of one comparison."""
    return out / "-".join(str(part).replace(" ", "_") for part in parts)


def truth(out: Path, name: str) -> dict[str, dict[str, float]]:
    """The mean score of every method in a full comparison, by kind."""
    at = folder(out, "truth", name)
    made = coterie.compare(config(name), methods=METHODS, rounds=ROUNDS, seeds=SEEDS, out=at)
    scores = {row.method: row.mean.mean for row in made.rows}
    return {kind: {m: scores[m] for m in names if m in scores} for kind, names in KINDS.items()}


def right(scores: dict[str, dict[str, float]]) -> str:
    """The simplest kind whose best method is within the margin of the best of all."""
    best = {kind: max(of.values()) for kind, of in scores.items()}
    return next(kind for kind, score in best.items() if score > max(best.values()) - MARGIN)


def probe(out: Path, name: str, repeat: int) -> Any:
    """The advice of one probe."""
    seeds = tuple(range(EACH * repeat, EACH * (repeat + 1)))
    asked = probe_config(config(name), seeds=seeds, out=folder(out, "probe", name, repeat))
    return conclude(coterie.compare(asked))


def answer(found: Any) -> str:
    """The answer of a probe in a few words."""
    return found.kind or "cannot tell: " + " or ".join(found.between)


def tables(out: Path) -> None:
    """Print both tables in Markdown."""
    print("| federation | " + " | ".join(KINDS) + " | right answer | expected |")
    print("| --- " * (len(KINDS) + 3) + "|")
    known = {}
    for name in FEDERATIONS:
        scores = truth(out, name)
        known[name] = {right(scores)} | ({*EXPECTED[name]} if len(EXPECTED[name]) > 1 else set())
        cells = (max(of.items(), key=lambda pair: pair[1]) for of in scores.values())
        row = " | ".join(f"{score:.1f} ({method})" for method, score in cells)
        print(f"| {name} | {row} | {right(scores)} | {' or '.join(EXPECTED[name])} |")
    print("\n| federation | right | cannot tell | wrong | of which fresh | answers |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in FEDERATIONS:
        found = [probe(out, name, repeat) for repeat in range(REPEATS)]
        every, fresh = (counts(part, known[name]) for part in (found, found[FRESH:]))
        said = Counter(map(answer, found)).most_common()
        told = "; ".join(f"{times} × {text}" for text, times in said)
        cells = " | ".join(map(str, every))
        print(f"| {name} | {cells} | {', '.join(map(str, fresh))} | {told} |")


def counts(found: list[Any], known: set[str]) -> tuple[int, int, int]:
    """How many probes are right, cannot tell, and are wrong."""
    told, unsure = sum(one.kind in known for one in found), sum(one.kind is None for one in found)
    return told, unsure, len(found) - told - unsure


def main() -> None:
    """Measure, or print the tables."""
    what, out = sys.argv[1], Path(sys.argv[2])
    if what == "tables":
        tables(out)
        return
    for name in FEDERATIONS:
        if what == "truth":
            print(name, right(truth(out, name)), flush=True)
        for repeat in range(REPEATS if what == "probes" else 0):
            print(name, repeat, answer(probe(out, name, repeat)), flush=True)


if __name__ == "__main__":
    main()
