"""Fuzz for a time and say what was found: ``make fuzz``, or ``tests/fuzz/run.py --seconds 60``.

Every try is numbered; ``--only KIND --seed N`` repeats one.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.attacks import ATTACKS
from fuzz.harness import Finding, attempt

GIB = 2**30
QUICK = [kind for kind in ATTACKS if kind != "commands"]
EVERY_KIND = [*QUICK * 5, "commands"]  # a process takes seconds to start


def main() -> int:
    """Try until the time is over; the number of findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--tries", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0, help="of the first try")
    parser.add_argument("--only", choices=ATTACKS)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (12 * GIB, 12 * GIB))
    warnings.simplefilter("ignore")
    os.environ["COTERIE_CACHE"] = tempfile.mkdtemp(prefix="coterie-fuzz-cache-")
    kinds = [asked.only] if asked.only else EVERY_KIND
    counts: Counter[str] = Counter()
    found, began, seed = 0, time.monotonic(), asked.seed
    while time.monotonic() - began < asked.seconds and counts["tries"] < asked.tries:
        kind = kinds[seed % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="coterie-fuzz-") as home:
            try:
                outcome = attempt(ATTACKS[kind], seed, Path(home))
                counts[f"{kind} {'refused' if outcome.refused else 'accepted'}"] += 1
            except Finding as finding:
                found += 1
                print(f"{kind}: {finding}", flush=True)
        counts["tries"] += 1
        seed += 1
    for name, count in sorted(counts.items()):
        print(f"{name}: {count}")
    print(f"{found} findings in {time.monotonic() - began:.0f} s")
    return min(found, 1)


if __name__ == "__main__":
    raise SystemExit(main())
