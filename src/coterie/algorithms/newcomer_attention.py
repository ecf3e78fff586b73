"""How a newcomer joins a finished run of FedAMP or HeurFedAMP.

In ``ROUNDS`` rounds of the method only the newcomer trains, near its cloud model:

    u = the average of the final models of the run
    w = LocalTrain(u);   u = Σ_j ξ_j w_j + ξ_own w     ξ by the method's own attention

Notes:
    With ``sigma = "auto"`` distances are in units of the clients' sampling noise, which a finished
    run does not keep. The unit here is the distance to the nearest client, which is at least the
    newcomer's own noise. After one short training from the average the newcomer still gives weight
    to unlike clients; this ends within a few rounds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.algorithm import single
from ..core.client import Client
from ..core.mixing import distances_between, mix, shares
from .attention import Attentive, Uploads
from .fedamp import FedAMP
from .heurfedamp import HeurFedAMP
from .likeness import STRANGER, TINY
from .newcomer_parts import Finals, Joined

ROUNDS = 5  # of the method in which only the newcomer trains

Points = Callable[[Any, Tensor, Tensor], Tensor]  # method, models [n, P], start [P] -> [n, P]


def attentive(algorithm: Attentive, client: Client, finals: Finals, points: Points) -> Joined:
    """The newcomer's cloud model; ``points`` are the vectors whose distances the method takes."""
    xi = shares(finals.sizes)
    u = mix(xi, finals.own)
    for index in range(ROUNDS):
        w = client.tuned(batches=f"join {index}").train(u)
        server = _uploads(torch.cat([finals.own, w[None]]), finals, algorithm, points)
        xi = algorithm._weigh(server, finals.round)(torch.arange(len(server.seen)))[-1]
        u = mix(xi, torch.cat([finals.own, w[None]]))
    return Joined(xi[: len(finals.own)], single(u))


def _uploads(models: Tensor, finals: Finals, algorithm: Any, points: Points) -> Uploads:
    """The server of FedAMP with the models of all clients and, in the last row, the newcomer's."""
    where = points(algorithm, finals.round.trainable(models), finals.start)
    distances = distances_between(where[-1:], where[:-1])
    z = torch.full((len(models), len(models)), STRANGER, dtype=torch.float64)
    z[-1, :-1] = distances / distances.min().clamp(min=TINY)
    none = models.new_zeros(0, len(models))
    seen = torch.ones(len(models), dtype=torch.bool)
    noise = torch.zeros(len(models), dtype=torch.float64)
    return Uploads(models, seen, finals.start, noise[:1].sum(), none, none, noise, z)


def moves(algorithm: FedAMP, models: Tensor, start: Tensor) -> Tensor:
    """FedAMP compares models by their distance."""
    return models - start[: models.shape[1]]


def directions(algorithm: HeurFedAMP, models: Tensor, start: Tensor) -> Tensor:
    """HeurFedAMP compares models by their angle."""
    W = models - start[: models.shape[1]] if algorithm.cos_on == "delta" else models
    lengths: Tensor = torch.linalg.vector_norm(W, dim=1, keepdim=True)
    return W / lengths.clamp(min=1e-30)
