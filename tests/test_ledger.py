"""What travels, measured by the run, is what the table of costs says.

A row gives the bytes one participant receives and sends in a round, for a model of ``m`` bytes.
Scalars count 8 bytes here: the task is float64 and counts are int64.
"""

import pytest

from coterie.adapt import Adapted, Distill, ElasticWeights, FineTune, FreezeBase
from coterie.algorithms.apfl import APFL
from coterie.algorithms.cfl import CFL
from coterie.algorithms.cobo import CoBo
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.erosion import Erosion
from coterie.algorithms.fedala import FedALA
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedavg_data import FedAvgData
from coterie.algorithms.fedbabu import FedBABU
from coterie.algorithms.feddbe import FedDBE
from coterie.algorithms.fedem import FedEM
from coterie.algorithms.fedfomo import FedFomo
from coterie.algorithms.fedpac import FedPAC
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.fedprox import FedProx
from coterie.algorithms.fedrep import FedRep
from coterie.algorithms.fedrod import FedRoD
from coterie.algorithms.heurfedamp import HeurFedAMP
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.lgfedavg import LGFedAvg
from coterie.algorithms.local import Local
from coterie.algorithms.mocha import Mocha
from coterie.algorithms.pafl import PaFL
from coterie.algorithms.pafl_ewc import PaFLEWC
from coterie.algorithms.pafl_kd import PaFLKD
from coterie.algorithms.perfedavg import PerFedAvg
from coterie.algorithms.pfedgraph import PFedGraph
from coterie.algorithms.pfedme import PFedMe
from coterie.algorithms.qfedavg import QFedAvg
from coterie.algorithms.scaffold import Scaffold
from coterie.algorithms.term import TERM
from coterie.algorithms.waffle import Waffle
from coterie.data.partition import hold_aux
from coterie.training.rounds import train
from support import engine_of, federation, task

S = 8  # a scalar
HEAD = 8 * (8 * 3 + 3)  # the last layer of support.mlp

# method -> (down, up, serve): bytes a client
LEDGER = {
    Local(): lambda m: (0, 0, 0),
    FedAvg(): lambda m: (m, m + S, m),
    FedAvgData(share=0.0): lambda m: (m, m + S, m),  # with a pool: tests/test_fedavg_data.py
    FedProx(): lambda m: (m, m + S, m),
    Scaffold(): lambda m: (2 * m, 2 * m, m),
    Scaffold(predict_with="local"): lambda m: (2 * m, 2 * m, 0),
    QFedAvg(): lambda m: (m, m + 2 * S, m),
    TERM(): lambda m: (m, m + 2 * S, m),
    PaFL(): lambda m: (m, m + 3 * S, m),  # the distillation loss before and after training
    PaFL(personal="proximal", checkpoint="best_federated_validation"): lambda m: (m, m + 2 * S, m),
    PaFLEWC(fisher_data="client_train"): lambda m: (m, m + S, m),
    FedAMP(): lambda m: (m + S, m, 0),
    HeurFedAMP(predict_with="cloud"): lambda m: (m + S, m, m),
    Adapted(FedAvg(), FineTune()): lambda m: (m, m + S, m),
    Adapted(FedProx(), FreezeBase()): lambda m: (m, m + S, m),
    Adapted(FedAvg(), Distill()): lambda m: (m, m + S, m),
    Adapted(FedAvg(), ElasticWeights(fisher_data="client_train")): lambda m: (m, m + S, m),
    # asked for the diagonal of what it would predict with; the average is served
    Adapted(FedAvg(), ElasticWeights(fisher_data="aggregate")): lambda m: (
        2 * m,
        2 * m + 2 * S,
        2 * m,
    ),
    APFL(): lambda m: (m, m + S, m),
    Erosion(): lambda m: (5 * m, 5 * m + 5 + S, m + S),  # everybody asks; a flag for each copy
    Waffle(): lambda m: (2 * 5 * m, 2 * 5 * m + 5, m + S),
    LGFedAvg(): lambda m: (HEAD, HEAD + S, HEAD),
    FedPer(): lambda m: (m - HEAD, m - HEAD + S, m - HEAD),
    FedRep(): lambda m: (m - HEAD, m - HEAD + S, m - HEAD),
    FedBABU(): lambda m: (m, m - HEAD + S, m),
    FedRoD(): lambda m: (m, m + S, m),
    # the moments of 3 classes of 8 features up, and the means of all down
    FedPAC(): lambda m: (m + 24 * S + 3, m + (24 + 3 + 1 + 1) * S, m),
    PFedGraph(): lambda m: (2 * m, m + S, 0),
    Ditto(): lambda m: (m, m + S, 0),
    PFedMe(): lambda m: (m, m + S, 0),
    PerFedAvg(): lambda m: (m, m + S, m),
    PerFedAvg("hf"): lambda m: (m, m + S, m),
    FedEM(components=4): lambda m: (4 * m, 4 * m + S, 4 * m),
    Mocha(): lambda m: (m + S, m, 0),
    Mocha(omega="learned", lam1=1e-4): lambda m: (m + S, m, 0),
    CFL(): lambda m: (m, m + S, m + S),  # served with the number of its cluster
    IFCA(k=3, start="redraw"): lambda m: (3 * (m + S), m + 2 * S, 3 * (m + S)),
}


@pytest.mark.parametrize("method", LEDGER, ids=str)
def test_ledger(method):
    on = task(method)
    down, up, serve = LEDGER[method](8 * on.problem.model.size)
    for record in train(method, on.problem, engine_of("wire", on), 2, participation=0.4):
        count = len(record.clients)
        assert record.traffic == (count * down, count * up, on.problem.population * serve)


@pytest.mark.parametrize("downloads", [2, 9])
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_ledger_of_fedfomo(downloads, participation):
    """M models of those who have uploaded, each with its owner; up a model and K ranks."""
    method = FedFomo(downloads=downloads)
    on = task(method)
    m, K, uploaded = 8 * on.problem.model.size, on.problem.population, set()
    for record in train(method, on.problem, engine_of("wire", on), 4, participation=participation):
        slots = sum(min(downloads, len(uploaded - {i})) for i in record.clients)
        uploaded |= set(record.clients)
        ready = sum(min(downloads, len(uploaded - {i})) for i in range(K))
        up = len(record.clients) * (m + 4 * K)
        assert record.traffic == (slots * (m + S), up, ready * (m + S))


def test_ledger_of_feddbe():
    """A mean of 8 features, which travels up once."""
    on = task(FedDBE())
    m = 8 * on.problem.model.size
    for record in train(FedDBE(), on.problem, engine_of("wire", on), 2):
        up = m + S if record.index else m + 9 * S
        assert record.traffic == (5 * (m + 8 * S), 5 * up, 5 * m)


def test_ledger_of_fedala():
    """A flag for each pass: none at first, then all that a client may need, then one."""
    method = FedALA(start_passes=4)
    on = task(method)
    m = 8 * on.problem.model.size
    for record, passes in zip(
        train(method, on.problem, engine_of("wire", on), 3), (0, 4, 1), strict=True
    ):
        assert record.traffic == (5 * (m + passes), 5 * (m + S), 5 * m)


@pytest.mark.parametrize(("participation", "pairs"), [(1.0, 2), (0.6, 2), (0.4, 1), (0.2, 0)])
def test_ledger_of_cobo(participation, pairs):
    """Each client of a ring is in two pairs, of two clients in one."""
    method = CoBo()
    on = task(method)
    m = 8 * on.problem.model.size
    for record in train(method, on.problem, engine_of("wire", on), 2, participation=participation):
        each = (1 + pairs) * m
        assert record.traffic == (len(record.clients) * (each + S), len(record.clients) * each, 0)


def test_ledger_of_distillation():
    """From T/2 on the loss before and after training comes with every update."""
    method = PaFLKD(checkpoint="best_federated_validation")
    on = task(method)
    m = 8 * on.problem.model.size
    records = list(train(method, on.problem, engine_of("wire", on), 4))
    each = [record.traffic.up // len(record.clients) for record in records]
    assert each == [m + 2 * S, m + 2 * S, m + 4 * S, m + 4 * S]


# Fisher data -> bytes more than FedAvg's, down and up, in rounds 0 to 3 of four
FISHER = {
    "server_aux": lambda m: ((0, 0, m, m), (0, 0, 0, 0)),
    "aggregate": lambda m: ((0, 0, m, m), (0, m, m, 0)),  # asked for a round ahead, not at the end
    "client_train": lambda m: ((0, 0, 0, 0), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("source", FISHER)
def test_ledger_of_a_fisher_diagonal(source):
    method = PaFLEWC(fisher_data=source)
    on = task(method, federated=hold_aux(federation(), 0.3, seed=0))
    m = 8 * on.problem.model.size
    more_down, more_up = FISHER[source](m)
    for record in train(method, on.problem, engine_of("wire", on), 4, participation=0.4):
        count, t = len(record.clients), record.index
        down, up = count * (m + more_down[t]), count * (m + S + more_up[t])
        assert record.traffic == (down, up, on.problem.population * m)


def test_ledger_of_the_servers_fisher():
    method = Adapted(FedAvg(), ElasticWeights(fisher_data="server_aux"))
    on = task(method, federated=hold_aux(federation(), 0.3, seed=0))
    m = 8 * on.problem.model.size
    for record in train(method, on.problem, engine_of("wire", on), 2):
        assert record.traffic == (5 * m, 5 * (m + S), 5 * 2 * m)
