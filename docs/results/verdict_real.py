"""Is the verdict honest on real models? Pairs of independently seeded Locals, judged by coterie.

    python docs/results/verdict_real.py

Digits in twelve clients (the demo's), dealt out anew for each of PARTITIONS seeds; each deal is
trained alone with SEEDS different starts and batch orders. Every pair of trainings of a deal is
taken for a comparison of a method with Local.
"""

import itertools

import numpy as np

from coterie.algorithms.local import Local
from coterie.api import configure
from coterie.core import paired
from coterie.data.simulation import simulate
from coterie.engines import make_engine
from coterie.runs.assemble import assemble
from coterie.training.rounds import train
from coterie.views.judgement import Choice, conclude
from coterie.views.mean_gain import mean_gain

PARTITIONS, SEEDS, ROUNDS = 10, 6, 20


def trained(partition: int) -> list[list[paired.Answers]]:
    """The answers of every client's local model, for each seed of training."""
    config = configure(None, seed=partition)
    assembly = assemble(config)
    recipe = config.train.recipe()
    found = []
    for seed in range(SEEDS):
        task = simulate(assembly.federations[partition], assembly.factory, recipe, seed=1000 + seed)
        method = Local(start="independent")
        *_, last = train(
            method,
            task.problem,
            make_engine("vmap", task.problem, task.shards),
            ROUNDS,
            evaluate_every=ROUNDS,
        )
        assert last.outcomes is not None
        found.append(list(last.outcomes.clients()))
    return found


def main() -> None:
    """Print how often the pairs differ and how often something is claimed."""
    federation = client = pairs = 0
    gains, variances, apart = [], [], []
    for partition in range(PARTITIONS):
        for ours, theirs in itertools.combinations(trained(partition), 2):
            both = list(zip(ours, theirs, strict=True))
            own = {str(i): paired.client_gain("accuracy", [pair]) for i, pair in enumerate(both)}
            known = {name: gain for name, gain in own.items() if gain is not None}
            g = np.array([[gain.gain for gain in known.values()]])
            v = np.array([[gain.variance for gain in known.values()]])
            judged = conclude({"m": (known, mean_gain(g, v))}, Choice("m", "nothing", 1))["m"]
            federation += judged.claim != "unclear"
            client += any(one.claim != "unclear" for one in judged.clients)
            for one, (a, b) in zip(known.values(), both, strict=True):
                share = float(((a.values == a.targets) != (b.values == b.targets)).mean())
                apart.append(share)
                gains.append(one.gain)
                variances.append((1e4 * share - one.gain**2) / (len(a.targets) - 1))
            pairs += 1
    luck = max(0.0, float(np.var(gains) - np.mean(variances))) ** 0.5
    print(f"{pairs} pairs: samples on which one is right and the other wrong {np.mean(apart):.1%},")
    print(f"luck of training {luck:.1f} points; claims about the mean over clients")
    print(f"{federation / pairs:.1%}, about a client {client / pairs:.1%}")


if __name__ == "__main__":
    main()
