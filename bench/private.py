"""Times a round under differential privacy against a plain one: clipped, and with noise.

    python bench/private.py cuda W1 W2

The engine is vmap; rounds take turns.
"""

import argparse

import torch

from coterie.core.optim import Recipe
from coterie.core.policies import privately
from coterie.core.privacy import Privacy
from coterie.data.simulation import simulate
from coterie.networks import registry
from run import contestant
from timing import race, tell
from workloads import WORKLOADS, Workload, federation, steady

KINDS = {
    "plain": None,
    "clipped": Privacy(noise=0.0, clip=1.0),
    "with noise": Privacy(noise=1.0, clip=1.0),
}


def seconds(work: Workload, device: torch.device, repeats: int) -> dict[str, float | None]:
    """The seconds of a round of each kind."""
    data, field = federation(work), {}
    factory = registry.factory(work.model, data.dataset, **work.options)
    for kind, privacy in KINDS.items():
        recipe = Recipe(lr=0.01, batch=work.batch)
        on = simulate(data, factory, recipe, device=device, privacy=privacy)
        field[kind] = contestant("vmap", steady(privately(work.method, on.problem), on))
    laps = race(field, device, repeats, lambda line: tell(f"{work.name}: {line}"))
    return {kind: lap.seconds for kind, lap in laps.items()}


def main() -> None:
    """A line for each workload and kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("names", nargs="*", default=["W1", "W2"])
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    for name in asked.names:
        found = seconds(WORKLOADS[name], torch.device(asked.device), asked.repeats)
        for kind, spent in found.items():
            over = f"{spent / found['plain']:.2f}" if spent and found["plain"] else "-"
            print(f"{name} {kind}: {spent} s, {over} of plain", flush=True)


if __name__ == "__main__":
    main()
