"""``coterie advise``: what a probe concludes, and when it says that it cannot tell."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.advising.advice import KINDS, MARGIN, PROBE, ROUNDS, conclude, probe_config
from coterie.errors import ConfigError
from coterie.views.comparison import Comparison
from synthetic import roster, run_of

PAGE = (Path(__file__).parents[1] / "docs" / "json.md").read_text("utf-8")
LEVELS = {"local": 80.0, "fedavg": 80.0, "ifca": 80.0, "fedavg_ft": 80.0, "fedamp": 80.0}


def probe(samples=400, clients=10, seeds=3, spread=1.0, **levels):
    """A made-up probe: the mean score of every method, and how clients differ from it."""
    runs = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        own = rng.normal(0, 4, clients)
        for method, level in {**LEVELS, **levels}.items():
            scores = (level + own + spread * rng.normal(0, 1, clients))[None]
            who = roster(clients, seed)
            runs.append(run_of(method, seed, 1, who=who, test=scores, samples=samples))
    return Comparison.of(runs)


def test_the_simplest_kind_is_advised_unless_another_is_better_by_the_margin():
    assert conclude(probe(spread=0.3)).kind == "stay local"
    assert conclude(probe(fedavg=90, ifca=90, fedamp=90)).kind == "average"
    assert conclude(probe(fedavg=40, ifca=90, fedamp=90)).kind == "cluster"
    assert conclude(probe(fedavg=86, ifca=84, fedavg_ft=94)).kind == "personalise"
    small = conclude(probe(fedavg=80 + MARGIN / 3, samples=4000, spread=0.1))
    assert small.contests[0].won  # shown, and not worth it
    assert small.kind == "stay local"


def test_simpler_kinds_than_the_advised_are_beaten_and_no_other_may_be_better():
    """The law of the answer, on probes of all sorts."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        levels = dict(zip(LEVELS, rng.uniform(76, 86, len(LEVELS)), strict=True))
        found = conclude(probe(samples=int(rng.integers(20, 400)), clients=6, **levels))
        assert {*found.between} <= {*KINDS}
        assert (found.kind is None) == (len(found.between) > 1)
        for one in found.contests:
            if one.kind == found.kind:
                assert one.gain.low > 0
            if one.simpler == found.kind:
                assert one.gain.high < found.margin


def test_few_test_samples_cannot_tell():
    """An uncertain probe names the kinds that are left, and says so in words."""
    made = probe(samples=12, clients=3, seeds=2, spread=6.0, fedavg=83, ifca=20, fedamp=84)
    found = conclude(made)
    assert found.kind is None
    assert {"stay local", "average"} <= {*found.between}
    assert "cannot tell" in found.words
    assert all(kind in found.words for kind in found.between)


def test_a_kind_is_represented_by_its_best_method_and_corrected_for_the_choice():
    """Two methods of a kind have two chances to be lucky: their interval is wider than one's."""
    better = conclude(probe(fedavg_ft=92, fedamp=85)).methods["personalise"]
    assert better == "fedavg_ft"
    assert conclude(probe(fedavg_ft=85, fedamp=92)).methods["personalise"] == "fedamp"
    both = probe(fedavg_ft=84, fedamp=70)
    alone = Comparison.of(run for run in both.runs if run.method != "fedamp")
    ours, theirs = (
        next(one.gain for one in conclude(made).contests if one.kind == "personalise")
        for made in (both, alone)
    )
    assert ours.gain == theirs.gain
    assert ours.p == pytest.approx(2 * theirs.p)
    assert ours.high > theirs.high
    assert ours.low < theirs.low


CONTRADICTIONS = {
    "data": {"name": "digits", "test": 0.4},
    "partition": {"name": "concept_shift", "clients": 4, "groups": 4},
    "model": {"name": "linear"},
    "train": {"lr": 0.2, "batch": 100},
    "engine": {"name": "vmap", "trace": False},
    "run": {"rounds": 2, "out": "the-comparison-of-this-config"},
}


def test_clients_that_contradict_each_other_are_told_to_stay_local(tmp_path):
    """A real probe; the folder of the config's comparison is not its own."""
    found = coterie.advise(CONTRADICTIONS, out=tmp_path / "probe")
    assert found.kind == "stay local", found
    assert found.comparison.methods == PROBE
    assert len(found.comparison.seeds) == 3
    assert "Stay local" in repr(found)
    again = coterie.advise(CONTRADICTIONS, out=tmp_path / "probe")  # the runs are read again
    assert again.to_dict() == found.to_dict()


def test_a_probe_is_short_unless_its_caller_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert probe_config({"run": {"rounds": 300, "seeds": 9}}).run.rounds == ROUNDS
    assert probe_config({"run": {"rounds": 4}}).run.rounds == 4
    assert probe_config({"run": {"rounds": 4}}, rounds=30).run.rounds == 30
    assert probe_config({"run": {"seed": 7}}).seeds == (7, 8, 9)
    assert probe_config(None, seeds=2).seeds == (0, 1)
    assert probe_config({"run": {"out": "mine"}}).run.out is None
    with pytest.raises(ConfigError, match="stay at the sites"):
        probe_config(None, federation=tmp_path)
    for given in ({"methods": ["fedavg"]}, {"method": "fedavg"}, {"adapt": "ft"}):
        with pytest.raises(ConfigError, match="probe"):
            probe_config(None, **given)


def test_the_command_says_first_what_it_runs_and_prints_documented_json(command, tmp_path):
    config = tmp_path / "x.toml"
    config.write_text(
        '[partition]\nname = "iid"\nclients = 3\n[model]\nname = "linear"\n'
        '[engine]\nname = "vmap"\ntrace = false\n[train]\nbatch = 100\n'
    )
    code, out, err = command("advise", config, "--rounds", "2", "--seeds", "2", "--json")
    assert not code
    value = json.loads(out)
    section = PAGE.partition("## coterie advise --json")[2].partition("\n## ")[0]
    assert {*value} == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    first = next(line for line in err.splitlines() if not line.startswith("preparing"))
    assert re.fullmatch(r"probe: 6 methods x 2 seeds x 2 rounds", first)
