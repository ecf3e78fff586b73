"""The contract on a GPU, where traces become CUDA graphs. Run by hand: ``pytest -m gpu``."""

from dataclasses import replace

import pytest
import torch

from coterie.adapt import ADAPTATIONS, Adapted
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.core.calls import REPLAYED, WRITTEN
from coterie.engines.simulator import Simulator
from coterie.engines.vmap import VmapBackend
from coterie.training.rounds import train
from support import (
    METHODS,
    RECIPE,
    assert_close,
    cnn,
    engine_of,
    last,
    mlp,
    normed,
    predictors,
    slower,
    task,
)
from test_trust import RATES, WRONG, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.mark.parametrize("participation", [0.5, 1.0])
@pytest.mark.parametrize("network", [mlp, cnn])
@pytest.mark.parametrize("name", METHODS)
def test_the_gpu_gives_what_the_reference_gives(name, network, participation):
    method = METHODS[name]()
    reference = last(method, task(method, network), "loop", 4, participation=participation)
    on = task(method, network, device="cuda")
    for engine, chunk in (("vmap", 2), ("vmap", 5), ("loop", None)):
        other = last(method, on, engine, 4, chunk=chunk, participation=participation)
        assert_close(predictors(other).models, predictors(reference).models, 1e-7)
        assert other.traffic == reference.traffic


@pytest.mark.parametrize("buffers", ["average", "local", "server"])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedfomo"])
def test_batch_norm_is_played(name, buffers):
    method, recipe = METHODS[name](), replace(RECIPE, buffers=buffers)
    reference = last(method, task(method, normed, recipe=recipe), "loop", 4, participation=1.0)
    on = task(method, normed, recipe=recipe, device="cuda")
    engine = VmapBackend(on.problem, on.shards, chunk=5)
    *_, record = train(method, on.problem, Simulator(engine), 4)
    assert_close(predictors(record).models, predictors(reference).models, 1e-7)
    assert not slower(engine)


@pytest.mark.parametrize("adaptation", ADAPTATIONS)
def test_adaptations_are_played(adaptation):
    method = Adapted(FedAvg(), ADAPTATIONS[adaptation]())
    reference = last(method, task(method), "loop", 3, participation=1.0)
    on = task(method, device="cuda")
    engine = VmapBackend(on.problem, on.shards, chunk=5)
    *_, record = train(method, on.problem, Simulator(engine), 3)
    assert_close(predictors(record).models, predictors(reference).models, 1e-7)
    assert not slower(engine)


def test_rounds_are_really_captured_and_equal_the_plain_ones():
    method = FedAvg()
    on = task(method, device="cuda")
    played, plain = (
        VmapBackend(on.problem, on.shards, chunk=5),
        VmapBackend(on.problem, on.shards, chunk=5, trace=False),
    )
    results = [
        list(train(method, on.problem, Simulator(engine), 5))[-1] for engine in (played, plain)
    ]
    assert_close(*(predictors(record).models for record in results), 1e-12)
    assert all(one.replay._graph is not None for one in played._executor._known.values())
    assert played.choice["trace"]
    assert not plain.choice["trace"]


@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "perfedavg"])
def test_kernels_in_float32_give_what_the_reference_gives(name):
    """Ours are for float32; a convolution, its bias and a relu are one of them."""
    torch.backends.cudnn.allow_tf32 = False
    method = METHODS[name]()
    reference = last(method, task(method, cnn), "loop", 2, participation=1.0)
    on = task(method, cnn, device="cuda", dtype=torch.float32)
    engine = VmapBackend(on.problem, on.shards, chunk=5)
    *_, record = train(method, on.problem, Simulator(engine), 2)
    assert_close(predictors(record).models.double(), predictors(reference).models, 1e-3)
    assert not slower(engine)


def test_auto_chooses_on_a_gpu():
    assert engine_of("auto", task(Local(), device="cuda")).choice["engine"] in ("vmap", "loop")


@pytest.mark.parametrize("network", [mlp, cnn])
@pytest.mark.parametrize("lr", RATES)
def test_an_honest_recording_is_captured_in_float32(lr, network):
    torch.backends.cudnn.allow_tf32 = False
    form = trained(lr, network=network, device="cuda")
    assert (form.way, form.why) == (REPLAYED, "")


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("wrong", [one.values[1] for one in WRONG if one.values[0] == "replay"])
def test_a_recording_that_does_not_train_as_the_call_does_is_refused(wrong, lr, monkeypatch):
    where, broken = wrong()
    monkeypatch.setattr(f"coterie.compiled.trace.replay.{where}", broken)
    assert trained(lr, device="cuda").way == WRITTEN
