"""FedRoD: a generic model that is fair to all classes, and a personal head on top of its features.

With f the body, h the generic head, g_i the personal one and n_c the client's samples of class c,
on every minibatch of a local round:

    (f, h) ← (f, h) − η ∇ CE(h(f(x)) + log n_c, y)          balanced softmax
    g_i    ← g_i − η ∇ CE(h(f(x)) + g_i(f(x)), y)           f and h held fixed
    (f, h) ← (f, h) + Σ_i p_i ((f, h)_i − (f, h))           on the server
    prediction: softmax(h(f(x)) + g_i(f(x)))                or h(f(x)) alone, the global model

Travels: as FedAvg. The personal head never leaves the client.

Notes:
    The heads are the network's last layer, which must be linear: the sum of two such heads is the
    head whose entries are the sums, so that a client predicts with one model of the usual form.
    Personal heads start at zero, so that everybody begins with the generic model (reading B-11).
    n_c counts the client's training samples; a class that it lacks counts as 1e-8.
    Both gradients are taken at the values before the step. A regression has no classes: its generic
    loss is the plain one.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..core.algorithm import Algorithm, Mixture, Round, rows, single
from ..core.batches import Batch
from ..core.client import Client, mean
from ..core.flat import FlatModel
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.tree import Tree
from ..errors import ConfigError
from .fedavg import Update, Weighting, average
from .lgfedavg import parts

ABSENT = 1e-8  # samples of a class that a client does not have


class Own(NamedTuple):
    head: Tensor  # [s] the personal head, added to the generic one


class Working(NamedTuple):
    w: Tensor  # [P]
    head: Tensor  # [parameters] the personal head, zero outside the last layer
    of_w: Tree  # optimiser states
    of_head: Tree


def balanced(logits: Tensor, counts: Tensor) -> Tensor:
    """Logits under the balanced softmax: ``+ log n_c``.

    >>> balanced(torch.zeros(1, 2), torch.tensor([1.0, 3.0])).softmax(-1)
    tensor([[0.2500, 0.7500]])
    """
    return logits + counts.clamp(min=ABSENT).log()


def linear_head(model: FlatModel, method: str) -> str:
    """The name of the last layer; refuses a network whose last layer is not linear."""
    name = model.layers()[-1]
    layer = model.module.get_submodule(name)
    if type(layer) is not nn.Linear:
        raise ConfigError(
            f"{method}: found '{name}', a {type(layer).__name__}, as the network's last layer; "
            "expected nn.Linear: take another network"
        )
    return name


@dataclass(frozen=True)
class FedRoD(Algorithm[Tensor, Tensor, Update, Own]):
    """Robust decoupling of a generic and a personal predictor.

    Fields:
        predict_with: ``both`` heads, or the ``generic`` one: the global model.
    """

    predict_with: Literal["both", "generic"] = "both"
    weighting: Weighting = "samples"

    bibtex: ClassVar[str] = """@inproceedings{chen2022fedrod,
  title={On Bridging Generic and Personalized Federated Learning for Image Classification},
  author={Chen, Hong-You and Chao, Wei-Lun},
  booktitle={ICLR}, year={2022}}"""
    private = Declaration(refused="its loss tells how many samples of each class a client has")

    def init(self, problem: Problem) -> tuple[Tensor, Own]:
        head = torch.zeros_like(problem.start[parts(problem.model, 1).upper])
        return problem.start, Own(rows(head, problem.population))

    def optimizers(self, problem: Problem) -> int:
        return 2  # of the generic model and of the personal head

    def download(self, server: Tensor, round: Round) -> Tensor:
        return rows(server, len(round.clients))

    def local(self, client: Client, received: Tensor, state: Own) -> tuple[Update, Own]:
        """Train the generic model and, on its features, the personal head."""
        at = parts(client.model, 1).upper
        counts = client.class_counts if client.classes else None
        zero = torch.zeros_like(client.trainable(received))
        mine = zero.index_fill(0, at, 1.0)

        def generic(w: Tensor, batch: Batch) -> Tensor:
            if counts is None:
                return client.loss(w, batch)
            logits = balanced(client.outputs(w, batch, training=batch.training), counts)
            return mean(client.losses_of(logits, batch), batch.mask)

        def step(now: Working, batch: Batch) -> Working:
            g = client.trainable(client.gradient(added(now.w, now.head), batch)) * mine
            w, of_w = client.step(now.w, client.gradient(now.w, batch, generic), now.of_w, batch)
            head, of_head = client.moved(now.head, g, now.of_head)
            return Working(w, head, of_w, of_head)

        head = zero.index_copy(0, at, state.head)
        begin = Working(received, head, client.begin(received), client.begin(received))
        end = client.scan(step, begin)
        client.end(end.of_w)
        client.end(end.of_head)
        return Update(end.w, client.size), Own(end.head[at])

    def aggregate(self, server: Tensor, uploads: Update, round: Round) -> Tensor:
        return average(server, uploads, self.weighting, 1.0)

    def predictor(self, client: Client, served: Tensor, state: Own) -> Mixture:
        if self.predict_with == "generic":
            return single(served)
        return single(served.index_add(0, parts(client.model, 1).upper, state.head))

    def global_model(self, server: Tensor) -> Tensor | None:
        return server

    def check(self, problem: Problem, rounds: int) -> None:
        linear_head(problem.model, "fedrod")


def added(w: Tensor, head: Tensor) -> Tensor:
    """The model whose parameters are the sums; its batch-norm statistics are those of ``w``."""
    return torch.cat([w[: len(head)] + head, w[len(head) :]])
