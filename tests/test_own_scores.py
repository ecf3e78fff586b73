"""A loss and a metric of one's own: named by a config, or passed from Python."""

import numpy as np
import pytest
import torch.nn.functional as F

import coterie
from coterie.core import metrics, paired_tests
from coterie.core.answers import Answers
from coterie.core.metrics import OwnMetric
from coterie.errors import ConfigError

SMALL = {"rounds": 2, "methods": ["fedavg"], "model": "linear", "clients": 4, "engine": "loop"}
MINE = """
import torch.nn.functional as F
from coterie.core.metrics import OwnMetric
from coterie.core.losses import OwnLoss


class Focal(OwnLoss):
    def __call__(self, output, y):
        found = F.cross_entropy(output, y, reduction="none")
        return (1 - (-found).exp()) ** 2 * found


class Cost(OwnMetric):
    title, higher_is_better = "cost", False

    def each(self, outputs, targets):
        return 1.0 - outputs[range(len(targets)), targets]


def crop(outputs, targets):
    raise SystemExit("a config called a function")
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    place = tmp_path_factory.mktemp("mine")
    (place / "mine_scores.py").write_text(MINE)
    return place


def brier(outputs, targets):
    """As the metric of this name, and larger is better."""
    held = np.arange(outputs.shape[1]) == targets[:, None]
    return -((outputs - held) ** 2).sum(1) / 2.0


class Recall(OwnMetric):
    """The hits among the samples of the last class: a ratio, and no mean of given samples."""

    def score(self, outputs, targets, weights):
        held = weights * (targets == targets.max())
        return 100 * held[outputs.argmax(1) == targets].sum() / held.sum()


def test_a_metric_that_is_a_mean_over_rows_is_judged_as_the_built_in_one():
    """Scores have the opposite sign; gains, intervals and the recommended method are the same."""
    own = coterie.compare(metric=brier, **SMALL)
    built_in = coterie.compare(metric="brier", **SMALL)
    assert own.runs[1].last == pytest.approx(-built_in.runs[1].last)
    for name, gains in own.gains_by_client.items():
        expected = built_in.gains_by_client[name]
        assert [*gains[0].gain[:5]] == pytest.approx([*expected[0].gain[:5]])
    assert "brier" in str(own)


def test_any_other_metric_is_resampled():
    metrics.register("tests:Recall", Recall)
    rng = np.random.default_rng(0)
    y, units = rng.integers(0, 3, 90), np.arange(90)
    sharp, dull = rng.dirichlet(np.ones(3), 90), rng.dirichlet(np.ones(3), 90)
    sharp[units[::2], y[::2]] = 2.0
    pair = Answers(sharp, y, units), Answers(dull, y, units)
    gain = paired_tests.client_gain("tests:Recall", [pair])
    ours, theirs = (Recall().score(one.values, y, np.ones(90)) for one in pair)
    assert gain.gain == ours - theirs
    assert gain.low < gain.gain < gain.high


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_loss_that_is_the_usual_one_gives_the_same_digest(engine):
    def usual(output, y):
        return F.cross_entropy(output, y, reduction="none")

    asked = {**SMALL, "engine": engine, "methods": ["scaffold"]}
    own, plain = coterie.compare(loss=usual, **asked), coterie.compare(**asked)
    for one, other in zip(own.runs, plain.runs, strict=True):
        assert one.last == pytest.approx(other.last)
        assert one.test_loss == pytest.approx(other.test_loss, rel=1e-4)


def test_a_config_names_classes_that_are_shown_where_their_code_is_not(mine):
    asked = {**SMALL, "code": mine, "loss": "mine_scores:Focal", "metric": "mine_scores:Cost"}
    found = coterie.compare(out=mine / "run", **asked)
    plain = coterie.compare(**{**asked, "loss": None})
    assert found.runs[1].summary["digest"] != plain.runs[1].summary["digest"]
    del metrics.METRICS["mine_scores:Cost"]
    assert found.verdict in str(coterie.read(mine / "run"))
    assert coterie.verify(mine / "run")


@pytest.mark.parametrize("field", ["loss", "metric"])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mine_scores:crop", "expected a class that extends"),
        ("os:system", "standard library"),
        ("given:brier", "passed from a Python program"),
    ],
)
def test_a_config_never_names_a_function(mine, field, name, error):
    with pytest.raises(ConfigError, match=error):
        coterie.compare(code=mine, **{**SMALL, field: name})


def test_losses_and_values_that_are_not_one_per_sample_are_refused():
    for option, wrong in (("loss", lambda output, y: output.sum()), ("metric", lambda o, y: 1.0)):
        wrong.__name__ = "wrong"
        with pytest.raises(ConfigError, match="expected one per sample"):
            coterie.compare(**{**SMALL, option: wrong})
    with pytest.raises(ConfigError, match="not sent to sites or to other processes"):
        coterie.compare(metric=brier, **{**SMALL, "engine": "wire"})
