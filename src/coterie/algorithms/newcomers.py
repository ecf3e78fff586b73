"""How a client that was not in the federation joins a finished run: one rule per method.

A finished run keeps every client's final predictor (:class:`Finals`). A rule weighs these models on
the newcomer's own labelled samples as the method's clients weigh each other, and gives the newcomer
a model (:class:`Joined`). Nobody else trains, and no model of the run was trained on the newcomer's
samples, so that all of them may judge the models. What follows is ordinary local training.

    global model    the model that all clients have
    FedFomo         Eq. 3 from the common start, over the final models of all clients
    FedFomo-MA      Eq. 14 over the averages of the final models
    FedeRiCo        the posterior (line 15) from the losses of all final models
    FedAMP, Heur    the cloud model u after rounds in which only the newcomer trains near it:
                    w = LocalTrain(u);  u = Σ_j ξ_j w_j + ξ_own w;  u is the average at first
    IFCA, CFL, Circle  the cluster's model with the lowest loss
    FedEM           E-steps at the final components

A method without a rule is refused, with the reason (``REFUSALS``).

Notes:
    FedFomo's newcomer weighs all clients' models, not ``downloads`` of them.
    After one short training from the average FedAMP's newcomer still gives weight to unlike
    clients; this ends within a few rounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..adapt import Adapted
from ..core.algorithm import AnyAlgorithm, GlobalModel, Mixture, Round, single
from ..core.client import Client
from ..core.mixing import mix, shares
from ..core.tree import Bank
from ..errors import ConfigError
from .apfl import APFL
from .attention import TINY, Attentive
from .cfl import Dividing
from .circle import Circle
from .cobo import CoBo
from .ditto import Ditto
from .erosion import Erosion
from .fedala import FedALA
from .fedbabu import FedBABU
from .fedcollab import FedCollab
from .feddbe import FedDBE
from .fedem import FedEM, Own
from .federico import FedeRiCo, kept_weights, posterior
from .fedfomo import FedFomo, Kept
from .fedfomo_ma import FedFomoMA, leave_one_out
from .fedpac import FedPAC
from .fedper import PersonalHead
from .fedrod import FedRoD
from .ifca import IFCA
from .lgfedavg import LGFedAvg
from .local import Local
from .mocha import Mocha
from .perfedavg import PerFedAvg
from .pfedgraph import PFedGraph
from .pfedme import PFedMe
from .scaffold import Scaffold
from .waffle import Waffle

ROUNDS = 5  # of FedAMP or HeurFedAMP in which only the newcomer trains


class Finals(NamedTuple):
    """What a finished run keeps, one row per client."""

    weights: Tensor  # [K, r] of each client's mixture
    models: Tensor  # [K, r, P]; a client's own model is the first
    sizes: Tensor  # [K] training samples
    start: Tensor  # [P] the common initial model
    round: Round  # the round after the run's last

    @property
    def own(self) -> Tensor:
        """Each client's own final model ``[K, P]``."""
        return self.models[:, 0]


class Joined(NamedTuple):
    """What a newcomer gets before its local training."""

    weights: Tensor | None  # [K] of the clients' models; None where all clients have one model
    predictor: Mixture
    parts: Tensor | None = None  # [K] what the predictor is made of; None: as the weights say


Rule = Callable[[Any, Client, Finals], Joined]


def join_rule(algorithm: AnyAlgorithm) -> Rule:
    """The rule by which a newcomer joins a run of this method; a ConfigError if there is none."""
    for kind in type(algorithm).__mro__:
        if kind in RULES:
            return RULES[kind]
        if kind in REFUSALS:
            raise ConfigError(_refused(algorithm, REFUSALS[kind]))
    raise ConfigError(_refused(algorithm, "it has no rule for a client that joins later"))


def _refused(algorithm: AnyAlgorithm, why: str) -> str:
    name = type(algorithm).__name__
    return f"nobody can join a finished run of {name}: {why}; expected a run of {WITH_RULE}"


# ---- the rules -----------------------------------------------------------------------------------


def _global(algorithm: AnyAlgorithm, client: Client, finals: Finals) -> Joined:
    w = finals.own[0]
    if not bool((finals.own == w).all()):  # batch-norm statistics that are each client's own
        w = mix(shares(finals.sizes), finals.own)
    return Joined(None, single(w))


def _controlled(algorithm: Scaffold, client: Client, finals: Finals) -> Joined:
    if algorithm.predict_with != "global":
        raise ConfigError(_refused(algorithm, _PERSONAL))
    return _global(algorithm, client, finals)


def _first_order(algorithm: FedFomo, client: Client, finals: Finals) -> Joined:
    everybody, start = _slots(finals.own), finals.start
    none = start.new_zeros(len(everybody))
    received = Bank(finals.own, everybody, everybody)
    theta, _, weights = algorithm.weigh(client, received, Kept(start, start, none, none))
    used = weights[1:]  # the first weight is that of the start itself
    return Joined(used, single(theta), used)


def _averages(algorithm: FedFomoMA, client: Client, finals: Finals) -> Joined:
    average, without = leave_one_out(finals.own)
    slots = _slots(torch.cat([average[None], without]))
    received = Bank(torch.cat([average[None], without]), slots, slots - 1)
    theta, weights = algorithm.weigh(client, received)
    return Joined(weights, single(theta))


def _posterior(algorithm: FedeRiCo, client: Client, finals: Finals) -> Joined:
    losses = client.map(lambda w: client.loss(w, "train"), finals.own).to(torch.float64)
    if algorithm.loss_reduction == "sum":
        losses = losses * client.size
    heat = algorithm.temperature
    weights = posterior(losses / heat, losses.isfinite())
    used = kept_weights(weights, algorithm.predict_min_weight) & (weights > 0)
    shared = weights[used] / weights[used].sum()
    return Joined(weights, Mixture(shared.to(finals.own.dtype), finals.own[used]))


def _attention(algorithm: Attentive, client: Client, finals: Finals) -> Joined:
    xi = parts = shares(finals.sizes)
    u = mix(xi, finals.own)
    for index in range(ROUNDS):
        w = client.tuned(batches=f"join {index}").train(u)
        models = torch.cat([finals.own, w[None]])
        xi = algorithm.attention(finals.round.trainable(models), finals.round)[-1]
        u, parts = mix(xi, models), xi[:-1] + xi[-1] * parts  # w was trained from u
    return Joined(xi[:-1], single(u), parts)


def _components(algorithm: FedEM, client: Client, finals: Finals) -> Joined:
    components, pi = finals.models[0], finals.weights.to(torch.float64)
    equal = components.new_full((len(components),), 1 / len(components))
    found = algorithm.predictor(client, components, Own(equal))
    users = pi / pi.sum(0).clamp(min=TINY)  # who uses a component, as in FedEM.collaboration
    return Joined(users @ found.weights.to(torch.float64), found)


def _chosen(algorithm: IFCA, client: Client, finals: Finals) -> Joined:
    models, cluster = _clusters(finals)
    w, best = algorithm.choose(client, Bank(models, _slots(models), _slots(models)))
    return Joined(_members(cluster == best, finals), single(w))


def _lowest(algorithm: Dividing | Circle, client: Client, finals: Finals) -> Joined:
    models, cluster = _clusters(finals)
    best = client.map(lambda w: client.loss(w, "val"), models).argmin()
    return Joined(_members(cluster == best, finals), single(models[best]))


def _slots(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def _clusters(finals: Finals) -> tuple[Tensor, Tensor]:
    """The distinct models ``[c, P]``, and the number of each client's ``[K]``."""
    found, cluster = finals.round.trainable(finals.own).unique(dim=0, return_inverse=True)
    first = [int((cluster == number).nonzero()[0]) for number in range(len(found))]
    return finals.own[first], cluster


def _members(inside: Tensor, finals: Finals) -> Tensor:
    """The share of each client's samples among those of a cluster's members ``[K]``."""
    return torch.where(inside, shares(finals.sizes * inside), 0.0)


RULES: dict[type, Rule] = {
    GlobalModel: _global,
    Scaffold: _controlled,
    FedFomo: _first_order,
    FedFomoMA: _averages,
    FedeRiCo: _posterior,
    Attentive: _attention,
    IFCA: _chosen,
    Dividing: _lowest,
    Circle: _lowest,
    FedEM: _components,
}
WITH_RULE = (
    "fedavg, fedfomo, federico, fedamp, heurfedamp, ifca, cfl, circle, fedem or a method of one "
    "model"
)

_PERSONAL = (
    "its folder keeps the clients' personal models, and the common model from which a newcomer "
    "would start is not among them"
)
_TUNED = (
    "its folder keeps each client's model after fine-tuning, and the model before it, which a "
    "newcomer would fine-tune, is not among them"
)
_HEADS = (
    "every client has a head of its own, and a newcomer's would have to be trained from nothing"
)
_COALITION = "coalitions form before training, and a newcomer has no part in that"
_REQUESTED = "it trains one model for each client that requested it before the first round"

REFUSALS: dict[type, str] = {
    Local: "its clients trained alone, so that there is nothing to join",
    APFL: _PERSONAL,
    Ditto: _PERSONAL,
    PFedMe: _PERSONAL,
    PerFedAvg: _PERSONAL,
    Adapted: "its folder keeps each client's model after the adaptation, and the model before it, "
    "which a newcomer would adapt, is not among them; take the run of the method without the "
    "adaptation: joining trains its model on the newcomer's samples",
    FedBABU: _TUNED,
    FedRoD: _PERSONAL,
    FedALA: _PERSONAL,
    PFedGraph: _PERSONAL,
    CoBo: _PERSONAL,
    FedDBE: _PERSONAL,
    FedPAC: _HEADS,
    FedCollab: _COALITION,
    PersonalHead: _HEADS,
    LGFedAvg: "every client has lower layers of its own, and a newcomer's would have to be trained "
    "from nothing",
    Mocha: "its clients' models and relations are trained together, so that a new client changes "
    "everybody's",
    Waffle: _REQUESTED,
    Erosion: _REQUESTED,
}
