"""A table with hidden groups that nobody tuned for: default methods find them from three lines."""

import numpy as np
import pytest

import coterie
from coterie.runs import collaboration

FINDERS = ("fedfomo", "fedamp", "heurfedamp", "federico", "cfl", "ifca", "circle")
SITES, GROUPS = 12, 3


def write(path, seed):
    """Twelve sites of unequal size; what is to be predicted depends on the site's group."""
    generator = np.random.default_rng(seed)
    teachers = generator.normal(size=(GROUPS, 20, 3))
    scale, offset = np.linspace(1, 50, 20), np.arange(20)
    lines = ["site," + ",".join(f"f{j}" for j in range(20)) + ",outcome"]
    for site in range(SITES):
        z = generator.normal(size=(150 + 12 * (site % 4), 20))
        noise = 0.5 * generator.normal(size=(len(z), 3))
        y = (z @ teachers[site % GROUPS] + noise).argmax(1)
        for x, c in zip(z * scale + offset, y, strict=True):
            lines.append(f"site {site}," + ",".join(f"{v:.4f}" for v in x) + f",class {c}")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_defaults_find_the_groups_of_an_unknown_table(tmp_path, seed):
    write(tmp_path / "sites.csv", seed)
    config = tmp_path / "that.toml"
    config.write_text('[data]\nname = "sites.csv"\nclient = "site"\ntarget = "outcome"\n')
    comparison = coterie.compare(
        config,
        methods=["fedavg", *FINDERS],
        rounds=40,
        seed=seed,
        engine="vmap",
        set={"run.evaluate_every": 40},
    )
    runs = {run.method: run for run in comparison.runs}
    bar = max(runs[name].summary["accuracy_last"] for name in ("local", "fedavg"))
    groups = np.arange(SITES) % GROUPS
    for name in FINDERS:
        history = runs[name]
        assert runs[name].summary["accuracy_last"] > bar, name
        kin = collaboration.kinship(history.weights, history.swaps)
        assert collaboration.in_group_weight(kin, groups) >= 0.8, name
