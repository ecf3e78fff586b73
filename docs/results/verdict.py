"""Is the verdict honest? Simulated comparisons with a known truth, judged by coterie's own code.

    python docs/results/verdict.py                     # the tables of verdict.md
    python docs/results/verdict.py --runs 200          # roughly

A simulated comparison has K clients with test samples of their own, Local, and M methods. Local is
right on a share ACCURACY of the samples. A method answers otherwise than Local: it is right where
Local is wrong, and wrong where Local is right, on a share DISCORDANT of the samples together. A
method without any effect is an independently seeded Local: the true accuracies of the two models of
a client differ by the luck of training (TRAINING points) and by nothing on the mean. With an
effect, the difference is the gain and, from client to client, its deviation. One method in M has
the gain. The recommended method is chosen on VALIDATION samples of each client.
"""

import argparse
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coterie.core import paired
from coterie.views.judgement import Choice, Judgement, conclude
from coterie.views.mean_gain import mean_gain

ACCURACY, TRAINING, VALIDATION = 0.86, 0.9, 50
DISCORDANT = 0.10
cached = functools.cache(paired.of_counts)


class Setting(NamedTuple):
    """What a simulated comparison is like."""

    clients: int = 5
    methods: int = 1
    deviation: float = 0.0  # of the clients' true gains, in points
    gain: float = 0.0  # mean true gain of the first method, in points
    samples: tuple[int, int] = (200, 200)  # test samples of a client: fewest and most
    merged: bool = False  # validation data was trained on: the choice is made on test data
    discordant: float = DISCORDANT
    training: float = TRAINING


class Simulated(NamedTuple):
    """One comparison."""

    judged: Judgement  # the recommended method
    every: dict[str, Judgement]
    truth: np.ndarray  # [M, K] true gains in this run, in points
    naive: bool  # a percentile bootstrap over clients and samples claims something


def simulate(setting: Setting, rng: np.random.Generator) -> Simulated:
    """Draw a comparison and judge it."""
    K, M = setting.clients, setting.methods
    sizes = rng.integers(setting.samples[0], setting.samples[1] + 1, K)
    truth = setting.training * rng.standard_normal((M, K))
    truth += setting.deviation * rng.standard_normal((M, K))
    truth[0] += setting.gain
    wins, losses = answers(truth / 100, sizes, setting.discordant, rng)
    by_val = answers(truth / 100, np.full(K, VALIDATION), setting.discordant, rng)
    score = (wins - losses) / sizes if setting.merged else by_val[0] - by_val[1]
    best = int(score.mean(1).argmax())
    on = "nothing" if M == 1 else "test" if setting.merged else "validation"
    every = judge(wins, losses, sizes, Choice(str(best), on, M))  # type: ignore[arg-type]
    naive = bootstrap(wins[best], losses[best], sizes, rng)
    return Simulated(every[str(best)], every, truth, naive)


def answers(
    gains: np.ndarray, sizes: np.ndarray, discordant: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """How often only the method is right, and only Local, for every method and client ``[M, K]``.

    All methods are compared with the same Local, so that its luck is theirs.
    """
    wrong = rng.binomial(sizes, 1 - ACCURACY)
    apart = np.maximum(discordant, np.abs(gains))
    win = np.minimum(1.0, (apart + gains) / 2 / (1 - ACCURACY))
    lose = np.minimum(1.0, (apart - gains) / 2 / ACCURACY)
    return rng.binomial(wrong, win), rng.binomial(sizes - wrong, lose)


def judge(
    wins: np.ndarray, losses: np.ndarray, sizes: np.ndarray, choice: Choice
) -> dict[str, Judgement]:
    """What coterie says of these counts."""
    found = {}
    for m, (w, c) in enumerate(zip(wins.tolist(), losses.tolist(), strict=True)):
        counts = zip(w, c, sizes.tolist(), strict=True)
        own = {str(k): cached(*count) for k, count in enumerate(counts)}
        gains = np.array([[gain.gain for gain in own.values()]])
        variances = np.array([[gain.variance for gain in own.values()]])
        found[str(m)] = own, mean_gain(gains, variances)
    return conclude(found, choice)


def bootstrap(
    wins: np.ndarray, losses: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> bool:
    """What a naive hierarchical bootstrap would claim: 95 % of its means on one side of 0."""
    who = rng.integers(0, len(sizes), (400, len(sizes)))
    n = sizes[who]
    b = rng.binomial(n, wins[who] / n)
    c = rng.binomial(n - b, np.minimum(1.0, losses[who] / np.maximum(1, n - wins[who])))
    low, high = np.quantile(((b - c) / n).mean(1), [0.025, 0.975])
    return bool(low > 0 or high < 0)


class Rates(NamedTuple):
    """Shares of comparisons."""

    worth: float  # "worth it" is said of the mean over clients
    not_worth: float  # "not worth it" is
    client: float  # a client is told that some method is better or worse
    wrong: float  # it is told so although its two models are equally good, or the other way round
    naive: float  # the naive bootstrap claims something
    covered: float  # the interval of the mean gain holds the true one


def rates(setting: Setting, runs: int, seed: int) -> Rates:
    """How often each sentence is said."""
    rng = np.random.default_rng([seed, *(abs(int(100 * x)) for x in _numbers(setting))])
    total = np.zeros(6)
    for _ in range(runs):
        made = simulate(setting, rng)
        claims = [
            (one.claim, made.truth[int(j.method), int(one.client)])
            for j in made.every.values()
            for one in j.clients
            if one.claim != "unclear"
        ]
        wrong = any(truth * (1 if claim == "better" else -1) <= 0 for claim, truth in claims)
        mean = setting.gain if made.judged.method == "0" else 0.0
        covered = made.judged.overall.low <= mean <= made.judged.overall.high
        says = made.judged.claim
        says_so = (says == "better", says == "worse", bool(claims), wrong)
        total += (*says_so, made.naive, covered)
    return Rates(*(total / runs))


def _numbers(setting: Setting) -> list[float]:
    flat: list[float] = []
    for value in setting:
        flat += value if isinstance(value, tuple) else [float(value)]
    return flat


GRID = [Setting(K, M, d) for K in (5, 8, 20) for M in (1, 29) for d in (0.0, 2.0)]
OTHERS = [
    Setting(2), Setting(3, 1, 10.0), Setting(5, 1, 10.0), Setting(20, 1, 10.0),
    Setting(5, samples=(20, 400)), Setting(8, 1, 2.0, samples=(20, 400)),
    Setting(8, samples=(20, 20)), Setting(20, samples=(20, 20)),
    Setting(5, 29, merged=True), Setting(8, 29, 2.0, merged=True), Setting(20, 29, merged=True),
    Setting(8, discordant=0.05), Setting(8, 29, discordant=0.05),
    *(Setting(K, M, training=0.0) for K in (5, 8, 20) for M in (1, 29)),
]  # fmt: skip
POWER = [
    Setting(K, M, d, 5.0, merged=merged)
    for K in (5, 8, 20)
    for M, merged in ((1, False), (29, False), (29, True))
    for d in (0.0, 2.0)
] + [Setting(5, 1, 0.0, -5.0), Setting(5, 1, 0.0, 5.0, discordant=0.06)]


def table(settings: Sequence[Setting], runs: int, seed: int) -> str:
    """A Markdown table, one row per setting."""
    heads = "clients, methods, gain, deviation, test samples, chosen on, worth it, not worth it, "
    heads += "a client is told something, something wrong, naive bootstrap claims, interval covers"
    lines = [f"| {heads.replace(', ', ' | ')} |", "| ---: " * 12 + "|"]
    for s in settings:
        found = rates(s, runs, seed)
        low, high = s.samples
        size = f"{low}" if low == high else f"{low}–{high}"
        extra = "" if s.discordant == DISCORDANT else f", {100 * s.discordant:.0f} % differ"
        extra += "" if s.training == TRAINING else ", no luck"
        on = "—" if s.methods == 1 else "test" if s.merged else "validation"
        cells = [s.clients, s.methods, f"{s.gain:g}", f"{s.deviation:g}", size + extra, on]
        cells += [f"{100 * share:.1f} %" for share in found]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def seeds_table(runs: int, seed: int) -> str:
    """How often an effect is claimed over several seeds, of gains with normal noise and no effect.

    A client's gain has a sampling variance of 5 in each seed; clients differ by a deviation; all
    clients of a seed share a luck.
    """
    rng, noise = np.random.default_rng(seed), 5.0
    truths = [(0.0, 0.0), (2.0, 0.0), (0.0, 1.0), (2.0, 1.0), (0.0, 3.0)]
    heads = [f"deviation {d:g}, luck {c:g}" for d, c in truths]
    lines = ["| seeds | clients | " + " | ".join(heads) + " |", "| ---: " * 7 + "|"]
    for S, K in [(S, K) for S in (2, 3, 5) for K in (5, 8, 20)]:
        cells = [str(S), str(K)]
        for deviation, luck in truths:
            shape = (runs, S, K)
            gains = deviation * rng.standard_normal((runs, 1, K)) + luck * rng.standard_normal(
                (runs, S, 1)
            )
            gains = gains + math.sqrt(noise) * rng.standard_normal(shape)
            found = [mean_gain(one, np.full((S, K), noise)) for one in gains]
            claims = [one is not None and one.p < paired.LEVEL for one in found]
            cells.append(f"{np.mean(claims):.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000, help="comparisons for each setting")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    error = 100 * math.sqrt(0.05 * 0.95 / asked.runs)
    print(
        f"{asked.runs} comparisons for each setting; a share of 5 % has an error of {error:.1f} %"
    )
    for title, settings in (
        ("No effect on the mean", GRID),
        ("No effect, other forms", OTHERS),
        ("A true gain of 5 points", POWER),
    ):
        print(f"\n## {title}\n\n{table(settings, asked.runs, asked.seed)}", flush=True)
    print(f"\n## No effect, several seeds\n\n{seeds_table(asked.runs, asked.seed)}")


if __name__ == "__main__":
    main()
