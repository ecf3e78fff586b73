"""The scikit-learn classifier: the library's own checks, and what sites add."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from coterie.estimator import PersonalisedClassifier

QUICK = PersonalisedClassifier("fedavg", model="linear", rounds=3, options={"engine.name": "loop"})


@parametrize_with_checks([QUICK])
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def two_sites(conflict):
    """Two sites of 60 samples; with ``conflict`` their labels are opposite."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3))
    sites = np.repeat(["b", "a"], 60)
    return X, ((X[:, 0] > 0) ^ (conflict & (sites == "b"))).astype(int), sites


def test_each_site_predicts_with_its_own_model():
    X, y, sites = two_sites(conflict=True)
    found = clone(QUICK).set_params(method="local", rounds=15, lr=0.5).fit(X, y, sites=sites)
    assert found.sites_.tolist() == ["a", "b"]
    assert (found.predict(X, site=sites) == y).mean() > 0.9
    assert (found.predict(X, site="a") == y)[:60].mean() < 0.1
    both = [found.predict_proba(X, site=name) for name in "ab"]
    assert found.predict_proba(X) == pytest.approx(np.mean(both, axis=0))
    with pytest.raises(ValueError, match="expected one of"):
        found.predict(X, site="c")


def test_one_global_model_answers_all_sites_alike():
    X, y, sites = two_sites(conflict=False)
    found = clone(QUICK).fit(X, y, sites=sites)
    assert np.array_equal(found.predict_proba(X, site="a"), found.predict_proba(X, site="b"))
