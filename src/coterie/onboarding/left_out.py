"""Leave-one-site-out validation: how good is a model of the other sites at mine, before I join?

For each site the model of FedAvg is trained by all others alone, with means and deviations of the
others, and answers the site's test samples, which training alone answers too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np

from ..algorithms.fedavg import FedAvg
from ..algorithms.local import Local
from ..core.algorithm import Mixture
from ..core.answers import Answers
from ..core.metrics import METRICS, score
from ..core.paired_tests import Gain, client_gain
from ..data.federation import Federation
from ..data.simulation import Simulation, simulate
from ..data.standard import standardised, with_unknown
from ..engines.loop import LoopBackend
from ..errors import ConfigError, did_you_mean, printable_lines
from ..runs.assemble import Assembly
from ..views import words
from ..views.clinical import Estimate, estimated_score
from ..views.clinical_page import score_text
from ..views.table import Line, Table, to_text
from .newcomer import trained_here


class LeftOutSite(NamedTuple):
    """One site: the scores on its test samples of the others' model and of its own."""

    client: str
    test: int
    score: float  # of the others' model
    interval: Estimate | None  # the same with its interval; None with few samples
    alone: float
    gain: Gain | None  # of the others' model over training alone


@final
@dataclass(frozen=True, repr=False)
class LeftOut:
    """The scores of all sites that were left out in turn."""

    metric: str
    sites: tuple[LeftOutSite, ...]

    def means(self, weights: Sequence[int] | None = None) -> tuple[float, float]:
        """The mean scores of the others' models and of training alone, over sites with both."""
        pairs = np.array([(site.score, site.alone) for site in self.sites])
        known = np.isfinite(pairs).all(1)
        if not known.any():
            return float("nan"), float("nan")
        other, alone = np.average(
            pairs[known], 0, None if weights is None else np.array(weights)[known]
        ).tolist()
        return other, alone

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md."""
        rows = [site.test for site in self.sites]
        return {
            "metric": self.metric,
            "left_out": [
                {
                    **{"client": one.client, "test_samples": one.test, "score": one.score},
                    "interval": one.interval and list(one.interval[1:]),
                    "alone": one.alone,
                    "gain": one.gain and one.gain._asdict(),
                }
                for one in self.sites
            ],
            "mean_of_sites": self.means(),
            "mean_of_rows": self.means(rows),
        }

    def __repr__(self) -> str:
        title = f"{METRICS[self.metric].title}{words.unit(self.metric)}"
        heads = ("site", "test samples", f"others' model, {title}", "alone", "difference")
        cells = [_cells(site, self.metric) for site in self.sites]
        rows = [site.test for site in self.sites]
        scored = sum(one.test for one in self.sites if math.isfinite(one.score + one.alone))
        means = (("mean of sites", None), ("mean by test samples", rows))
        for name, weights in means if len(self.sites) > 1 else ():
            other, alone = (words.number(x, self.metric) for x in self.means(weights))
            cells.append((name, str(scored), other, alone, ""))
        return printable_lines(to_text(Table.of(heads, map(Line, cells))))


def _cells(site: LeftOutSite, metric: str) -> tuple[str, ...]:
    shown, gain = words.number(site.score, metric), words.NONE
    if site.interval is not None:
        shown = score_text(site.interval, metric)
    if site.gain is not None:
        gain = words.gain_cell(site.gain.gain, site.gain.low, site.gain.high, metric)
    return site.client, str(site.test), shown, words.number(site.alone, metric), gain


def leave_out(assembly: Assembly, only: str | None = None) -> LeftOut:
    """Leave each site of an experiment out in turn, or ``only`` one; each costs a training."""
    config, seed = assembly.config, assembly.config.seeds[0]
    whole, metric = assembly.federations[seed], config.run.metric
    if len(whole) < 3 or whole.foreign is not None or whole.relabel is not None:
        raise ConfigError(
            "the others' model is that of two sites or more with classes and test data of their "
            f"own; found {whole.partition} with {len(whole)} sites"
        )
    names = list(whole.clients)
    if only is not None and only not in names:
        raise ConfigError(f"--site: no site is called '{only}'; {did_you_mean(only, names)}")
    local = trained_here(Local(), _simulation(assembly, whole), config.run.rounds, metric)
    assert local.outcomes is not None
    alone = list(local.outcomes.clients())
    found = []
    for i, name in enumerate(names):
        if only in (None, name):
            said = _of_others(assembly, whole, i)
            pair = score(metric, *said[:2]), score(metric, *alone[i][:2])
            gain = client_gain(metric, [(said, alone[i])])
            interval = estimated_score(metric, said)
            found.append(LeftOutSite(name, len(said.targets), pair[0], interval, pair[1], gain))
    return LeftOut(metric, tuple(found))


def _of_others(assembly: Assembly, whole: Federation, i: int) -> Answers:
    """The answers of the others' model to the test samples of site ``i``."""
    others = [j for j in range(len(whole)) if j != i]
    source = whole.source or whole.dataset
    made = _some(whole, others)
    hidden = with_unknown(source, made.clients, made.train)
    made = replace(made, dataset=standardised(hidden, made.train))
    run = assembly.config.run
    last = trained_here(FedAvg(), _simulation(assembly, made), run.rounds, run.metric)
    assert last.mixture is not None
    predictor = Mixture(last.mixture.weights[0], last.mixture.models[0])
    at_site = _simulation(assembly, replace(_some(whole, [i]), dataset=made.dataset))
    said: dict[int, Answers] = {}
    LoopBackend(at_site.problem, at_site.shards).judged(predictor, 0, run.metric, said)
    return said[0]


def _some(whole: Federation, kept: Sequence[int]) -> Federation:
    """The federation of some of the clients."""
    lists: dict[str, Any] = {
        name: tuple(getattr(whole, name)[j] for j in kept)
        for name in ("clients", "train", "val", "test")
    }
    return replace(whole, **lists, groups=None, aux=None, federated=None)


def _simulation(assembly: Assembly, federation: Federation) -> Simulation:
    config = assembly.config
    recipe, seed = config.train.recipe(), config.seeds[0]
    return simulate(federation, assembly.factory, recipe, seed=seed)
