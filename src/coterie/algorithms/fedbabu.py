"""FedBABU: a shared body is trained under a head that nobody trains; clients fine-tune at the end.

    body_i ← LocalTrain(body), the head frozen at its random start
    body   ← body + Σ_i p_i (body_i − body)                         on the server
    prediction: E_t epochs on the client's own data from (body, head), the whole network

Travels: the model down (its head is the same in every round), the body and the sample count up.

Notes:
    A head that all clients share from the start keeps the bodies of clients with other classes
    alike: no client pulls the features towards a head of its own.
    Frozen parameters change neither by momentum nor by weight decay. Batch-norm statistics belong
    to their layer. The fine-tuned model is used to predict and is never sent (reading B-10).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.ranges import CountOrZero
from .fedavg import Update, Weighting, average
from .lgfedavg import Layers, parts


class Server(NamedTuple):
    theta: Tensor  # [P] the body, and the head as it started
    body: Tensor  # [b] the body's positions in it


@dataclass(frozen=True)
class FedBABU(Algorithm[Server, Tensor, Update, tuple[()]]):
    """Body aggregation and body update, then fine-tuning.

    Fields:
        head: the layers that are not trained before the end: the number of last layers, or names.
        tune_epochs: passes E_t over the client's data before it predicts; None takes the recipe's.
    """

    head: Layers = 1
    tune_epochs: CountOrZero | None = 5
    weighting: Weighting = "samples"

    bibtex: ClassVar[str] = """@inproceedings{oh2022fedbabu,
  title={{FedBABU}: Toward Enhanced Representation for Federated Image Classification},
  author={Oh, Jaehoon and Kim, SangMook and Yun, Se-Young},
  booktitle={ICLR}, year={2022}}"""
    private = Declaration()

    def init(self, problem: Problem) -> tuple[Server, tuple[()]]:
        return Server(problem.start, parts(problem.model, self.head).lower), ()

    def download(self, server: Server, round: Round) -> Tensor:
        return rows(server.theta, len(round.clients))

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        at = parts(client.model, self.head)
        w = client.train(received, only=~at.is_upper)
        return Update(w[at.lower], client.size), ()

    def aggregate(self, server: Server, uploads: Update, round: Round) -> Server:
        theta, body = server
        moved = average(theta[body], uploads, self.weighting, 1.0)
        return server._replace(theta=theta.index_copy(0, body, moved))

    def predictor(self, client: Client, served: Tensor, state: tuple[()]) -> Mixture:
        return single(client.tuned(epochs=self.tune_epochs).train(served))

    def global_model(self, server: Server) -> Tensor | None:
        return server.theta

    def check(self, problem: Problem, rounds: int) -> None:
        parts(problem.model, self.head)
