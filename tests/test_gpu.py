"""The contract on a GPU, with rounds recorded as CUDA graphs. Run by hand: ``pytest -m gpu``."""

import pytest
import torch

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.engines import make_engine
from coterie.engines.vmap import VmapEngine
from coterie.run import run
from support import METHODS, assert_close, cnn, last, mlp, predictors, task

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


def test_rounds_are_really_recorded_and_equal_the_plain_ones():
    method = FedAvg()
    on = task(method, device="cuda")
    recorded, plain = VmapEngine(on, chunk=5), VmapEngine(on, chunk=5, capture=False)
    results = [list(run(method, on, engine, 5))[-1] for engine in (recorded, plain)]
    assert_close(*(predictors(record).models for record in results), 1e-12)
    assert len(recorded._recorder._graphs) >= 1
    assert recorded.choice["capture"]
    assert not plain.choice["capture"]


def test_state_may_stay_in_host_memory():
    on = task(Local(), device="cuda")
    *_, record = run(Local(), on, make_engine("vmap", on, state="host"), 3)
    assert record.states.w.device.type == "cpu"


def test_auto_chooses_on_a_gpu():
    assert make_engine("auto", task(Local(), device="cuda")).choice["engine"] in ("vmap", "loop")
