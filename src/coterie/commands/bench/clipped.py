"""FedAvg whose steps follow the mean of clipped per-sample gradients: DP-SGD without its noise."""

from dataclasses import dataclass

from torch import Tensor
from torch.func import vmap

from ...algorithms.fedavg import Update, average
from ...core.algorithm import GlobalModel, Round, rows
from ...core.batches import Batch
from ...core.client import Client
from ...core.optim import shortened
from ...core.problem import Problem
from ...core.tree import Tree


@dataclass(frozen=True)
class ClippedFedAvg(GlobalModel[Tensor, Tensor, Update, tuple[()]]):
    """Federated averaging of models trained on clipped samples.

    Fields:
        clip: the longest gradient of one sample.
    """

    clip: float = 1.0

    def init(self, problem: Problem) -> tuple[Tensor, tuple[()]]:
        """The common start; clients keep nothing."""
        return problem.start, ()

    def download(self, server: Tensor, round: Round) -> Tensor:
        """The global model."""
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: tuple[()]) -> tuple[Update, tuple[()]]:
        """Train the received model."""

        def step(carry: tuple[Tensor, Tree], batch: Batch) -> tuple[Tensor, Tree]:
            w, rule = carry
            return client.step(w, self.gradient(client, w, batch), rule, batch)

        w, _ = client.scan(step, (received, client.begin(received)))
        return Update(w, client.size), ()

    def gradient(self, client: Client, w: Tensor, batch: Batch) -> Tensor:
        """The mean of the samples' gradients, each of length ``clip`` at most."""

        def one(x: Tensor, y: Tensor, position: Tensor) -> Tensor:
            alone = Batch(x[None], y[None], None, position[None], batch.step)
            return shortened(client.gradient(w, alone), self.clip)

        each: Tensor = vmap(one)(batch.x, batch.y, batch.position)
        if batch.mask is None:
            return each.mean(0)
        return batch.mask @ each / batch.mask.sum().clamp(min=1)

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        """Average by samples."""
        return average(server, uploads, "samples", 1.0)

    def model(self, server: Tensor) -> Tensor:
        """The global model."""
        return server
