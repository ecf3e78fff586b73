"""Are the four answers right? Simulated comparisons with a known truth, judged by coterie's code.

    python docs/results/verdict.py                  # what verdict.md tells, and verdict.csv
    python docs/results/verdict.py --runs 100       # roughly

A simulated comparison has K sites, Local and M methods. A method and Local differ in being right on
a share of the test samples. The true gain of a method at a site is the method's gain, plus the
site's deviation, plus the luck of training. The method is chosen on VALIDATION samples per site.

A claim of A or B is false if it has the wrong sign, or if the true gain of this run's models is 0;
in settings without a gain the true gains of a method are shifted so that their mean is exactly 0.
A claim of C is false if the mean over trainings is 0, one of D if the mean over all sites is 0.
For A the share of false ones among the sites that are told something is averaged over comparisons.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coterie.core import inference
from coterie.core.answers import Answers
from coterie.core.paired_tests import LEVEL, Gain, client_gain, count_variance, mid_p

VALIDATION, DISCORDANT = 50, 0.10
SITES, ROWS, METHODS = (3, 5, 12, 50), (20, 60, 200, 1000), (1, 5, 29)
DEVIATIONS, LUCKS = (0.0, 5.0, 10.0), (0.0, 2.0)
SEEDS = (5, 10, 20)
BLOCK = 250  # comparisons at a time
Rng = np.random.Generator


class Setting(NamedTuple):
    """What a simulated comparison is like."""

    sites: int
    rows: int
    methods: int = 1
    deviation: float = 0.0  # of the sites' true gains, in points
    luck: float = 0.0  # of the true gains of a site's two models, in points
    gain: float = 0.0  # mean true gain of every method, in points
    idle: float = 0.0  # share of the sites at which no method has any effect
    discordant: float = DISCORDANT


class Drawn(NamedTuple):
    """Comparisons, one per row: true gains in points, wins and losses of the chosen method."""

    truth: np.ndarray  # [R, K]
    wins: np.ndarray
    losses: np.ndarray


def draw(s: Setting, runs: int, rng: Rng) -> Drawn:
    """Simulated comparisons."""
    shape = (runs, s.methods, s.sites)
    truth = s.deviation * rng.standard_normal(shape) + s.luck * rng.standard_normal(shape)
    if s.gain == 0:
        truth -= truth.mean(-1, keepdims=True)
    truth += s.gain
    truth = np.where(rng.random((runs, 1, s.sites)) < s.idle, 0.0, truth).clip(-60.0, 60.0)
    wins, losses = counts(truth, VALIDATION, s.discordant, rng)
    best = (wins - losses).mean(-1).argmax(-1)
    chosen = truth[np.arange(runs), best]
    return Drawn(chosen, *counts(chosen, s.rows, s.discordant, rng))


def counts(
    truth: np.ndarray, rows: int, discordant: float, rng: Rng
) -> tuple[np.ndarray, np.ndarray]:
    """Wins and losses on so many samples."""
    apart = np.maximum(discordant, np.abs(truth) / 100)
    win, lose = (apart + truth / 100) / 2, (apart - truth / 100) / 2
    wins = rng.binomial(rows, win)
    return wins, rng.binomial(rows - wins, lose / np.maximum(1 - win, 1e-12))


# ---- A -------------------------------------------------------------------------------------------


class Sites(NamedTuple):
    """What A needs of comparisons ``[R, K]``."""

    truth: np.ndarray
    gains: np.ndarray
    p: np.ndarray
    above: np.ndarray
    covered: float  # share of true gains inside the pooled intervals

    def rates(self, sure: float = inference.SURE, own: float = inference.OWN) -> tuple[float, ...]:
        """The share of false claims, and the share of sites that gain and are told so."""
        said = inference.told(self.gains, self.p, self.above, sure, own)
        wrong, count = (said != 0) & (said * self.truth <= 0), (said != 0).sum(-1)
        false = (wrong.sum(-1) / np.maximum(1, count)).mean()
        gaining = self.truth > 0
        return float(false), float(((said > 0) & gaining).sum() / max(1, gaining.sum()))


def sites(drawn: Drawn, rows: int, ends: bool = False) -> Sites:
    """The own tests and the pooled answers of comparisons."""
    gains = 100.0 * (drawn.wins - drawn.losses) / rows
    above, inside = np.empty(gains.shape), np.full(gains.shape, math.nan)
    for at in (slice(i, i + BLOCK) for i in range(0, len(gains), BLOCK)):
        found = inference.pool(gains[at], pooled(drawn.wins[at], drawn.losses[at], rows))
        above[at] = found.above()
        if ends:  # the interval ends where the probability of a larger gain is 2.5 and 97.5 %
            inside[at] = np.abs(found.above(drawn.truth[at]) - 0.5) <= (1 - LEVEL) / 2
    p = mid_p(drawn.wins, drawn.losses)
    return Sites(drawn.truth, gains, p, above, float(inside.mean()))


def pooled(wins: np.ndarray, losses: np.ndarray, rows: int) -> np.ndarray:
    """The variances of each comparison's gains, with one share of discordant samples for all."""
    each = [
        inference.pooled_variances(np.stack([w, c, np.full(len(w), rows)], 1))
        for w, c in zip(wins, losses, strict=True)
    ]
    return np.array(each)


def choice_of_thresholds(runs: int, rng: Rng) -> str:
    """The thresholds of A that are best on half of some random settings, tried on the others."""
    made = [random_setting(rng) for _ in range(80)]
    ready = [sites(draw(s, runs, rng), s.rows) for s in made]
    lines = ["| Pr(gain) | own p | worst, chosen on | power | worst, tried on | power |"]
    lines.append("| ---: " * 6 + "|")
    for sure in (0.95, 0.975, 0.98, 0.99, 0.995, 2.0):
        for own in (0.025, 0.05, 0.10):
            found = np.array([one.rates(sure, own) for one in ready])
            halves = found[::2], found[1::2]
            cells = [f"{100 * x:.1f} %" for h in halves for x in (h[:, 0].max(), h[:, 1].mean())]
            name = "none (own test alone)" if sure > 1 else f"{sure:g}"
            lines.append(f"| {name} | {own:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def random_setting(rng: Rng) -> Setting:
    """A setting that is none of the table's."""
    size, rows = int(rng.integers(3, 40)), int(20 * 50 ** rng.random())
    gain, idle = rng.choice([0.0, 2.0, 4.0, 7.0]), rng.choice([0.0, 0.0, 0.3, 0.6])
    deviation, luck = rng.choice([0.0, 1.0, 3.0, 7.0]), rng.choice([0.0, 1.0])
    return Setting(size, rows, 1, deviation, luck, gain, idle, rng.uniform(0.04, 0.25))


# ---- B, C, D -------------------------------------------------------------------------------------


def of_sites(drawn: Drawn, rows: int) -> np.ndarray:
    """For each comparison, 1 if B claims a gain, -1 a loss."""
    gains = 100.0 * (drawn.wins - drawn.losses) / rows
    variances = count_variance(drawn.wins, drawn.losses, rows)
    return np.array(
        [said(inference.these_sites(gained(g, v))) for g, v in zip(gains, variances, strict=True)]
    )


def gained(gains: Iterable[float], variances: Iterable[float]) -> list[Gain]:
    """Gains with known variances."""
    return [Gain(g, v, g, g, 1.0, 1) for g, v in zip(gains, variances, strict=True)]


def said(found: inference.MeanGain | None, tests: int = 1) -> float:
    """The claim about a mean gain that is the clearest of so many tests."""
    assert found is not None
    p = inference.holm([found.p] + [1.0] * (tests - 1))[0]
    return float(np.sign(found.gain)) if p < LEVEL else 0.0


def trained_again(s: Setting, runs: int, rng: Rng, trainings: int, shared: float) -> np.ndarray:
    """The claims of C: the clearest of the methods, whose mean gains have normal noise.

    A share of the variance by test samples is the same in all trainings.
    """
    v = 1e4 * s.discordant / s.rows
    means = math.sqrt((s.luck**2 + (1 - shared) * v) / s.sites) * rng.standard_normal(
        (runs, s.methods, trainings)
    )
    means += math.sqrt(shared * v / s.sites) * rng.standard_normal((runs, s.methods, 1))
    means += s.gain
    error = math.sqrt(v * (shared + (1 - shared) / trainings) / s.sites)
    drawn = means.std(-1, ddof=1) / math.sqrt(trainings)
    p = inference.p_of_two(means.mean(-1), error, drawn, trainings - 1)
    clearest = means.mean(-1)[np.arange(runs), p.argmin(-1)]
    return np.where(p.min(-1) * s.methods < LEVEL, np.sign(clearest), 0.0)  # Holm's first step


def like_these(s: Setting, runs: int, rng: Rng) -> np.ndarray:
    """The claims of D: the clearest of the methods, whose gains have normal noise."""
    v = 1e4 * s.discordant / s.rows
    gains = math.sqrt(s.deviation**2 + s.luck**2 + v) * rng.standard_normal(
        (runs, s.methods, s.sites)
    )
    gains += s.gain
    t = np.abs(gains.mean(-1)) / np.sqrt(np.maximum(gains.var(-1, ddof=1), v))
    clearest = gains[np.arange(runs), t.argmax(-1)]
    made = [inference.sites_like_these(gained(g, np.full(s.sites, v))) for g in clearest]
    return np.array([said(found, s.methods) for found in made])


def only_one(s: Setting, runs: int, rng: Rng) -> tuple[float, float, float]:
    """If one method alone gains: how often it is chosen, B claims a gain, and does so if chosen."""
    truth = np.zeros((runs, s.methods, s.sites))
    truth[:, 0] = s.gain
    wins, losses = counts(truth, VALIDATION, s.discordant, rng)
    best = (wins - losses).mean(-1).argmax(-1)
    chosen = truth[np.arange(runs), best]
    claims = of_sites(Drawn(chosen, *counts(chosen, s.rows, s.discordant, rng)), s.rows)
    right = best == 0
    return float(right.mean()), float((claims > 0).mean()), float((claims[right] > 0).mean())


def harder_c(runs: int, rng: Rng) -> str:
    """The worst false claims of C over shares of the rows' noise and of luck that differ."""
    found = {}
    for n in SEEDS:
        for M in METHODS:
            for shared in (0.0, 0.8, 1.0):
                for rows in (20, 1000, 5000):
                    for luck in (0.0, 2.0, 4.0):
                        s = Setting(5, rows, M, 0.0, luck)
                        claims = trained_again(s, runs, rng, n, shared)
                        found[n, M, shared, rows, luck] = float((claims != 0).mean())
    worst = max(found, key=found.__getitem__)
    return f"{len(found)} settings, at most {found[worst]:.1%} ({worst})"


def on_test(s: Setting, runs: int, rng: Rng) -> tuple[float, float]:
    """False claims of A and B without any effect if test samples choose: Holm, no pooling."""
    wins, losses = counts(np.zeros((runs, s.methods, s.sites)), s.rows, s.discordant, rng)
    smallest, tests = mid_p(wins, losses).reshape(runs, -1).min(-1), s.methods * s.sites
    alone = [inference.holm([p] + [1.0] * (tests - 1))[0] < LEVEL for p in smallest]
    variances, gains = count_variance(wins, losses, s.rows), 100.0 * (wins - losses) / s.rows
    best = (np.abs(gains.mean(-1)) / np.sqrt(variances.sum(-1))).argmax(-1)
    at = np.arange(runs), best
    made = [
        inference.these_sites(gained(g, v)) for g, v in zip(gains[at], variances[at], strict=True)
    ]
    return float(np.mean(alone)), float(np.mean([said(one, s.methods) != 0 for one in made]))


# ---- the tables ----------------------------------------------------------------------------------

COLUMNS = (
    "A false",
    "A false, half idle",
    "A false, 9 of 10 idle",
    "A told",
    "A interval covers",
    "B false",
    "B told",
)
COLUMNS += ("D false", "D told", *(f"C false, {n} seeds" for n in SEEDS), "C told, 5 seeds")


def rates(s: Setting, runs: int, rng: Rng) -> list[float]:
    """The numbers of COLUMNS: error and power of all four questions in one setting.

    A takes fewer comparisons of many sites: half of them with 12 sites, a quarter with 50.
    """
    without = draw(s, runs, rng)
    gaining = draw(s._replace(gain=5.0), runs, rng)
    few = max(runs // 4, min(runs, 6 * runs // s.sites))
    idle = [draw(s._replace(gain=g, idle=i), few, rng) for g, i in ((5.0, 0.5), (15.0, 0.9))]
    some = [Drawn(*(part[:few] for part in one)) for one in (gaining, without, *idle)]
    told = sites(some[0], s.rows, ends=s.methods == 1)
    false_a = [sites(one, s.rows).rates()[0] for one in some[1:]]
    b = [of_sites(one, s.rows) for one in (without, gaining)]
    c = [trained_again(s, runs, rng, n, 0.5) for n in SEEDS]
    d = [like_these(s._replace(gain=g), runs, rng) for g in (0.0, 5.0)]
    means = [*false_a, told.rates()[1], told.covered]
    for claims in (b, d):
        means += [float((claims[0] != 0).mean()), float((claims[1] > 0).mean())]
    means += [float((claims != 0).mean()) for claims in c]
    told_c = trained_again(s._replace(gain=5.0), runs, rng, 5, 0.5)
    return [*means, float((told_c > 0).mean())]


def grid(runs: int, seed: int, out: Path) -> str:
    """All settings into a file; a Markdown table of the worst error and of the power by size."""
    rng, rows = np.random.default_rng(seed), []
    for K in SITES:
        for n in ROWS:
            for M, d, luck in ((M, d, c) for M in METHODS for d in DEVIATIONS for c in LUCKS):
                rows.append(((K, n, M, d, luck), rates(Setting(K, n, M, d, luck), runs, rng)))
            print(f"... {K} sites, {n} rows", flush=True)
    with out.open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n")
        write.writerow(["sites", "rows", "methods", "deviation", "luck", *COLUMNS])
        for key, found in rows:
            write.writerow([*(f"{x:g}" for x in key), *(f"{x:.3f}" for x in found)])
    return summary(rows)


def summary(rows: Sequence[tuple[tuple[float, ...], list[float]]]) -> str:
    """The worst error over methods, deviation and luck, and the power with 29 methods."""
    heads = ["sites", "rows", "A, %: false at most", "B", "C", "D", "A, %: told", "B", "C", "D"]
    lines = ["| " + " | ".join(heads) + " |", "| ---: " * len(heads) + "|"]
    for K in SITES:
        for n in ROWS:
            here = {
                key[2:]: dict(zip(COLUMNS, f, strict=True)) for key, f in rows if key[:2] == (K, n)
            }
            worst = [
                max(x for f in here.values() for name, x in f.items() if name.startswith(start))
                for start in ("A false", "B false", "C false", "D false")
            ]
            plain, apart = here[29, 0.0, 0.0], here[29, 5.0, 0.0]
            cells = [f"{100 * x:.1f}" for x in worst]
            cells += [f"{100 * plain[q]:.0f}, {100 * apart[q]:.0f}" for q in ("A told", "B told")]
            cells += [f"{100 * plain[q]:.0f}" for q in ("C told, 5 seeds", "D told")]
            lines.append(f"| {K} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- other metrics -------------------------------------------------------------------------------

OTHERS = (
    "auc", "auprc", "balanced_accuracy", "f1", "log_loss", "brier", "rmse", "mae", "r2",
    "auc of 3", "balanced_accuracy of 3", "f1 of 3",
)  # fmt: skip


def others_table(runs: int, rng: Rng) -> str:
    """False claims by each metric for two models that err as often, at one site and at three."""
    kinds = [(20, 0.5), (60, 0.5), (20, 0.1), (200, 0.1)]
    heads = [f"{n} rows" + (", 10 % positive" if share < 0.5 else "") for n, share in kinds]
    lines = [f"| metric | {' | '.join(heads)} |", "| --- " + "| ---: " * len(heads) + "|"]
    for name in OTHERS:
        metric, _, several = name.partition(" of ")
        cells = []
        for n, share in kinds:
            if share < 0.5 and (several or metric in ("rmse", "mae", "r2")):
                cells.append("—")
                continue
            own, mean = [], []
            for _ in range(runs):
                found = [
                    client_gain(metric, [models(metric, n, share, several, rng)]) for _ in "123"
                ]
                judged = [one for one in found if one is not None and one.judged]
                own += [one is not None and one.p < LEVEL for one in found]
                overall = inference.these_sites(judged)
                mean.append(overall is not None and overall.p < LEVEL)
            cells.append(f"{np.mean(own):.1%}, {np.mean(mean):.1%}".replace("%", " %"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def models(metric: str, n: int, share: float, several: str, rng: Rng) -> tuple[Answers, Answers]:
    """The answers of two models that are equally good and partly err together."""
    if metric in ("rmse", "mae", "r2"):
        y = rng.standard_t(4, n)
        made = [y + rng.standard_t(4, n) for _ in "12"]
        return tuple(Answers(x, y, np.arange(n)) for x in made)  # type: ignore[return-value]
    chances = [0.5, 0.4, 0.1] if several else [1 - share, share]
    y = rng.choice(len(chances), n, p=chances)
    raw = rng.standard_normal((3, n, len(chances)))
    shown = np.exp(0.7 * (raw[0] + raw[1:]) + 1.2 * np.eye(len(chances))[y])
    shown = shown / shown.sum(-1, keepdims=True)
    if metric in ("balanced_accuracy", "f1"):
        shown = shown.argmax(-1)
    return Answers(shown[0], y, np.arange(n)), Answers(shown[1], y, np.arange(n))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="comparisons in each setting")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, out = np.random.default_rng([asked.seed, 1]), Path(__file__).with_suffix(".csv")
    print(f"## The thresholds of A\n\n{choice_of_thresholds(asked.runs // 3, rng)}\n", flush=True)
    print(f"## Error and power\n\n{grid(asked.runs, asked.seed, out)}\n", flush=True)
    print("## Chosen on test samples\n\n| sites | rows | methods | A false | B false |")
    print("| ---: " * 5 + "|")
    for s in (Setting(K, n, M) for K in (5, 12) for n in (60, 200) for M in (5, 29)):
        a, b = on_test(s, asked.runs // 3, rng)
        print(f"| {s.sites} | {s.rows} | {s.methods} | {a:.1%} | {b:.1%} |".replace("%", " %"))
    print("\n## One of 29 methods gains 5 points\n")
    for K, n in ((5, 60), (5, 200), (12, 200)):
        chosen, told, given = only_one(Setting(K, n, 29, gain=5.0), asked.runs, rng)
        print(
            f"{K} sites, {n} rows: chosen {chosen:.0%}, B tells {told:.0%}, if chosen {given:.0%}"
        )
    print(f"\n## C elsewhere\n\n{harder_c(asked.runs, rng)}", flush=True)
    print(f"\n## Other metrics\n\n{others_table(asked.runs // 5, rng)}")


if __name__ == "__main__":
    main()
