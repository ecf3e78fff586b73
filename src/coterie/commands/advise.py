"""A short probe of a federation that says stay local, average, cluster or personalise.

import coterie
found = coterie.advise("my-federation.toml")
print(found)           # the answer and its evidence
print(found.kind)      # "personalise", or None if the probe cannot tell
"""

import contextlib
from dataclasses import dataclass
from typing import Any, Unpack, final

from ..api import Options, Source, compare_config, configure
from ..errors import ConfigError, printable_lines
from ..experiment.assemble import assemble
from ..experiment.config.schema import Config
from ..experiment.estimate import timings
from ..experiment.runner import Watch
from ..report.advice_text import advice_text, advice_words
from ..report.outcomes import Comparison
from ..results.advice import Advice
from ..results.advice import advise as conclude

PROBE = ("local", "fedavg", "ifca", "fedavg_ft", "fedamp")
ROUNDS = 10  # at most, unless the caller says otherwise
SEEDS = 3
TIMED = ("fedavg", "fedamp")  # a cheap and a dear method, for the estimate of time


@final
@dataclass(frozen=True, eq=False, repr=False)
class Advised:
    """The answer of a probe, and the comparison that it rests on."""

    advice: Advice
    comparison: Comparison

    @property
    def kind(self) -> str | None:
        """What is advised; None if the probe cannot tell."""
        return self.advice.kind

    @property
    def words(self) -> str:
        """The answer and its evidence in a few sentences."""
        return advice_words(self.advice, self.comparison)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md."""
        found, path = self.advice, self.comparison.path
        return {
            "advice": found.kind,
            "between": list(found.between),
            "answer": self.words,
            "margin": found.margin,
            "metric": self.comparison.metric,
            "methods": found.methods,
            "contests": [
                {"kind": one.kind, "simpler": one.simpler, "won": one.won, **one.gain._asdict()}
                for one in found.contests
            ],
            "rounds": len(self.comparison.runs[0].history.lines),
            "seeds": list(self.comparison.seeds),
            "folder": path and str(path),
        }

    def __repr__(self) -> str:
        return printable_lines(advice_text(self.advice, self.comparison))


def advise(
    source: Source = None, *, progress: Watch | None = None, **options: Unpack[Options]
) -> Advised:
    """Probe a federation with a few rounds of methods of every kind, and say which kind suits it.

    Rounds and seeds can be given; the methods are the probe's own. With ``out`` a probe that was
    interrupted is continued.
    """
    return advise_config(probe_config(source, **options), progress)


def probe_config(source: Source = None, **options: Unpack[Options]) -> Config:
    """The config of a probe: the federation of a config, with the probe's methods."""
    if options.get("methods") is not None or options.get("method") is not None:
        raise ConfigError(
            f"--methods, --method: a probe has its own methods ({', '.join(PROBE)}); leave them "
            "out, or compare others with 'coterie compare'"
        )
    asked = configure(source, **options)
    if asked.adapt.name != "none":
        raise ConfigError(
            f"adapt.name: found '{asked.adapt.name}'; a probe compares methods with and without "
            "fine-tuning itself; leave it out"
        )
    if asked.run.federation is not None or asked.engine.name == "wire":
        raise ConfigError(
            "run.federation, engine.name: a probe compares answers on test samples, and these stay "
            "at the sites; ask 'coterie compare', whose gains the sites compute themselves"
        )
    rounds, seed = asked.run.rounds, asked.run.seed
    out = None if options.get("out") is None else asked.run.out  # the config's is for comparisons
    update: dict[str, Any] = {"methods": PROBE, "out": out}
    if options.get("rounds") is None:
        update["rounds"] = min(rounds, ROUNDS)
    if options.get("seeds") is None:
        update["seeds"] = tuple(range(seed, seed + SEEDS))
    return asked.model_copy(update={"run": asked.run.model_copy(update=update)})


def advise_config(config: Config, progress: Watch | None = None) -> Advised:
    """Run the probe of a config made by :func:`probe_config`."""
    made = compare_config(config, progress)
    return Advised(conclude(made), made)


def expected_seconds(config: Config) -> float | None:
    """The time that a probe will take, from the first rounds of a few of its methods.

    None where it is not measured: the clients are in processes of their own.
    """
    with contextlib.closing(assemble(config)) as assembly:
        methods = assembly.config.methods()
        some = [method for method in methods if method.label in TIMED]
        timed = timings(assembly, some, 0.0)
    if not timed:
        return None
    mean = sum(one.seconds for one in timed) / len(timed)
    return mean * len(methods) * len(config.seeds)
