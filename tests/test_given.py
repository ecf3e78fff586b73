"""A Python program passes its own model and data to ``compare`` and ``run``."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import coterie
from coterie.api import configure
from coterie.errors import CoterieError
from coterie.networks.registry import with_scores

SMALL = {"rounds": 2, "engine": "loop", "methods": ["fedavg"]}


def sites(count=3, rows=30):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, rows, 4)).astype(np.float32)
    return {f"s{k}": (x[k], (x[k, :, 0] > 0).astype(np.int64)) for k in range(count)}


class Own(nn.Module):
    """A network whose outputs are wrapped in some way."""

    def __init__(self, shape, classes, wrap="tensor", **further):
        super().__init__()
        self.head = nn.Linear(shape[0], classes)
        self.wrap, self.further = wrap, further

    def forward(self, x):
        scores = self.head(x)
        return {
            "tensor": scores,
            "object": SimpleNamespace(logits=scores, loss=None),
            "dict": {"logits": scores},
            "tuple": (scores, x),
            "none": None,
        }[self.wrap]


def made(shape, classes):
    """A factory."""
    return Own(shape, classes, "dict")


def scores(result):
    return [run.summary["digest"] for run in result.runs]


def test_every_form_of_data_gives_the_same_clients_and_the_same_run():
    """A dict of pairs, of torch Datasets, and a Dataset that was made of either."""
    from coterie.data.given import dataset_of

    pairs = sites()
    sets = {k: TensorDataset(*map(torch.from_numpy, pair)) for k, pair in pairs.items()}
    forms = (pairs, sets, dataset_of(pairs))
    results = [coterie.compare(data=form, **SMALL) for form in forms]
    assert results[0].runs[0].roster.clients == tuple(pairs)
    assert len({str(scores(result)) for result in results}) == 1


def test_a_pair_of_arrays_is_partitioned():
    x, y = next(iter(sites(1, 90).values()))
    run = coterie.run(data=(x, y), clients=3, rounds=1, method="fedavg", engine="loop")
    assert len(run.roster.clients) == 3


def test_a_dataframe_is_read_as_a_table_is():
    pandas = pytest.importorskip("pandas")
    rows = [
        {"site": name, "a": float(x[0]), "b": "uv"[int(x[1] > 0)], "ill": "ny"[int(y)]}
        for name, pair in sites().items()
        for x, y in zip(*pair, strict=True)
    ]
    columns = {"data.client": "site", "data.target": "ill"}
    result = coterie.compare(data=pandas.DataFrame(rows), set=columns, **SMALL)
    assert result.runs[0].roster.clients == ("s0", "s1", "s2")
    with pytest.raises(CoterieError, match="target"):
        coterie.compare(data=pandas.DataFrame(rows), **SMALL)


@pytest.mark.parametrize(
    "data", [{}, [1, 2, 3], {"a": 3}, (np.zeros((3, 2)), np.zeros(4)), (np.zeros(3), np.zeros(3))]
)
def test_other_data_is_refused_with_what_is_expected(data):
    with pytest.raises(CoterieError, match="expected"):
        coterie.compare(data=data, **SMALL)


@pytest.mark.parametrize("wrap", ["tensor", "object", "dict", "tuple"])
def test_a_model_may_return_an_object_a_dict_or_a_tuple(wrap):
    """All of them give the same digest, by every engine; an instance may be called as before."""
    given = dict(data=sites(), **SMALL)
    torch.manual_seed(0)
    plain = Own((4,), 2)
    expected = scores(coterie.compare(model=plain, **given))
    wrapped = Own((4,), 2, wrap)
    wrapped.load_state_dict(plain.state_dict())
    found = coterie.compare(model=wrapped, **given)
    assert scores(found) == expected
    assert type(wrapped(torch.zeros(1, 4))) is type(Own((4,), 2, wrap)(torch.zeros(1, 4)))
    vmapped = coterie.compare(model=wrapped, **{**given, "engine": "vmap"})
    assert vmapped.runs[1].last == pytest.approx(found.runs[1].last)


def test_a_factory_and_a_class_are_called_with_the_shape_and_options():
    found = configure(data=sites(), model=Own, set={"model.wrap": "dict", "model.any": 3})
    assert found.model.options == {"wrap": "dict", "any": 3}
    by = [coterie.compare(data=sites(), model=model, **SMALL) for model in (made, Own)]
    assert scores(by[0]) == scores(by[1])


def test_a_model_without_scores_is_refused():
    with pytest.raises(CoterieError, match="returns a NoneType; expected a tensor"):
        coterie.compare(data=sites(), model=Own((4,), 2, "none"), **SMALL)
    with pytest.raises(CoterieError, match=r"expected a torch\.nn\.Module"):
        with_scores(3)
    with pytest.raises(CoterieError, match="expected a name"):
        coterie.compare(data=sites(), model=3, **SMALL)


def test_a_run_in_a_folder_is_continued_with_the_same_objects_only(tmp_path):
    given = dict(data=sites(), **SMALL, out=tmp_path / "run")
    model = Own((4,), 2)
    first = coterie.compare(model=model, **given)
    assert scores(coterie.compare(model=model, **given)) == scores(first)
    (tmp_path / "run" / "comparison.json").unlink()
    with pytest.raises(CoterieError, match="passed again"):
        coterie.resume(tmp_path / "run")
