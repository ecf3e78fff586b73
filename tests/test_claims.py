"""The papers' main claims at the scale ``digits``: on structure and sign, not on decimals.

They need no download and a minute or a few each; ``make test-slow`` runs them. The same cards at
the scale ``small`` need the real datasets (``shared``: COTERIE_DATA names their folder).
"""

import os

import pytest

from coterie.studies.reproducing import reproduction

# card, the beginning of its claim, methods that it needs
CLAIMS = [
    ("P1-T3", "FedFomo is above Local and FedAvg", ("local", "fedavg", "fedfomo@5")),
    ("P2-T1", "On CIFAR-10 FedeRiCo is above Local", ("local", "federico")),
    ("P2-T1", "On CIFAR-10 Local is above FedAvg", ("local", "fedavg")),
    ("P4-T1", "Under concept shift WAFFLE is at least 20", ("local", "fedavg", "waffle")),
    ("P4-T1", "Under concept shift Weight Erosion is at", ("local", "fedavg", "erosion")),
    (
        "P5-T3",
        "HeurFedAMP is above Separate, FedAvg",
        ("local", "fedavg", "fedavg_ft", "heurfedamp"),
    ),
    ("P5-T1", "On IID data HeurFedAMP is level with FedAvg", ("local", "fedavg", "heurfedamp")),
]
# where a few groups leave room above Local; with more, clients of one class have 100 %
ROOM = {"P2-T1": ("CIFAR-10 2 groups",)}
REAL = os.environ.get("COTERIE_DATA")


def judged(card, scale, beginning, methods, out):
    """The outcome of a claim of a card, with the runs that it needs."""
    study = reproduction(card, scale).study
    (claim,) = [c for c in study.claims if c.text.startswith(beginning)]
    columns = [c.name for c in study.columns if not claim.columns or c.name in claim.columns]
    columns = ROOM.get(card, columns) if scale == "digits" else columns
    how = {"columns": tuple(columns), "methods": methods, "changes": {"engine.threads": 1}}
    outcome = reproduction(card, scale, out=out, **how).run()
    (found,) = [j for j in outcome.judged if j.claim.text.startswith(beginning)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("card", "beginning", "methods"), CLAIMS)
def test_a_papers_claim_holds_on_digits(tmp_path, card, beginning, methods):
    found = judged(card, "digits", beginning, methods, tmp_path)
    assert found.leans, found.evidence  # with fewer seeds than a judgement needs


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(REAL is None, reason="COTERIE_DATA names no folder with the real datasets")
@pytest.mark.parametrize(("card", "beginning", "methods"), CLAIMS)
def test_a_papers_claim_holds_on_real_data(tmp_path, card, beginning, methods):
    found = judged(card, "small", beginning, methods, tmp_path)
    assert found.leans, found.evidence  # with fewer seeds than a judgement needs


@pytest.mark.slow
def test_p3s_identity_relates_the_means(tmp_path):
    """The mean relative accuracy is the mean accuracy minus Local's."""
    one = reproduction("P3-T2", "digits", methods=("local", "fedavg"), seeds=1, out=tmp_path)
    outcome = one.run()
    column = next(c for c in outcome.study.columns if c.number.endswith("_last"))
    alone, own = (outcome.values(column, method) for method in ("local", "fedavg"))
    relative = outcome.values(column, "fedavg", "relative_to_local")
    assert own
    for seed, value in own.items():
        assert relative[seed] == pytest.approx(value - alone[seed], abs=1e-3)
