"""What travels, measured by the run, is what the cost table of the spec (section 11) says.

A row gives the bytes one participant receives and sends in a round, for a model of ``m`` bytes.
Scalars count 8 bytes here: the task is float64 and counts are int64.
"""

import pytest

from coterie.algorithms.apfl import APFL
from coterie.algorithms.cfl import CFL
from coterie.algorithms.ditto import Ditto
from coterie.algorithms.erosion import Erosion
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedem import FedEM
from coterie.algorithms.fedper import FedPer
from coterie.algorithms.fedrep import FedRep
from coterie.algorithms.ifca import IFCA
from coterie.algorithms.lgfedavg import LGFedAvg
from coterie.algorithms.local import Local
from coterie.algorithms.mocha import Mocha
from coterie.algorithms.perfedavg import PerFedAvg
from coterie.algorithms.pfedme import PFedMe
from coterie.algorithms.waffle import Waffle
from coterie.engines import make_engine
from coterie.run import run
from support import task

S = 8  # a scalar
HEAD = 8 * (8 * 3 + 3)  # the last layer of support.mlp

# method -> (down, up, serve): bytes a client
LEDGER = {
    Local(): lambda m: (0, 0, 0),
    FedAvg(): lambda m: (m, m + S, m),
    APFL(): lambda m: (m, m + S, m),
    Erosion(): lambda m: (5 * m, 5 * m + S, m + S),  # everybody asks
    Waffle(): lambda m: (2 * 5 * m, 2 * 5 * m, m + S),
    LGFedAvg(): lambda m: (HEAD, HEAD + S, HEAD),
    FedPer(): lambda m: (m - HEAD, m - HEAD + S, m - HEAD),
    FedRep(): lambda m: (m - HEAD, m - HEAD + S, m - HEAD),
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
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_ledger(method, participation):
    on = task(method)
    down, up, serve = LEDGER[method](8 * on.model.size)
    records = list(run(method, on, make_engine("wire", on), 3, participation=participation))
    for record in records:
        count = len(record.clients)
        assert record.traffic == (count * down, count * up, on.population * serve)
