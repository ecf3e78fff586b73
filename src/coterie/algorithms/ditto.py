"""Ditto: FedAvg's global model, and on each client a personal model that is held near it.

    w_i ← LocalTrain(w_t);   w ← w + η_g Σ_i p_i (w_i − w)                 FedAvg
    v_i ← v_i − η (∇F_i(v_i) + λ (v_i − w_t))                              stays on the client

w_t is the global model as received, frozen.

Travels: as FedAvg. v_i never leaves the client.

Notes:
    Both models see the same minibatches, as in the authors' code. v_i starts at the common start
    and takes as many steps as w_i. The paper can choose λ for each client on validation data; here
    λ is one number, by default 0.1 of the paper's {0.1, 1, 2}: a larger λ holds a client in a
    minority to a global model that is wrong for it.
    Stable only while ηλ < 2.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..core.algorithm import OwnModel, Round, check_pull, rows
from ..core.client import Client
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import NotNegative
from .fedavg import ServerLr, Update, Weighting, average
from .fedprox import proximal


class Own(NamedTuple):
    v: Tensor  # [P]


@dataclass(frozen=True)
class Ditto(OwnModel[Tensor, Tensor, Update, Own]):
    """A personal model, regularised towards FedAvg's.

    Fields:
        lam: strength λ of the pull of v_i towards the global model; 0 is local training.
    """

    lam: NotNegative = 0.1
    weighting: Weighting = "samples"
    server_lr: ServerLr = 1.0

    bibtex: ClassVar[str] = """@inproceedings{li2021ditto,
  title={Ditto: Fair and Robust Federated Learning Through Personalization},
  author={Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle={ICML}, year={2021}}"""
    private = Declaration((Query(times=2),))

    def init(self, problem: Problem) -> tuple[Tensor, Own]:
        return problem.start, Own(rows(problem.start, problem.population))

    def optimizers(self, problem: Problem) -> int:
        return 2  # of w_i and of v_i

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: Own) -> tuple[Update, Own]:
        anchor = client.trainable(received)

        def pull(v: Tensor) -> Tensor:
            return proximal(client.trainable(v), anchor, self.lam)

        return Update(client.train(received), client.size), Own(client.train(state.v, penalty=pull))

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, self.server_lr)

    def model(self, state: Own) -> Tensor:
        return state.v

    def check(self, problem: Problem, rounds: int) -> None:
        check_pull(problem, rounds, "ditto.lam", self.lam)
