"""Rows out of the change of a model: what a linear first layer tells of what it was trained on.

For a row x, the gradient of a linear layer's weights is δ xᵀ and that of its biases δ. Where one
row alone moves a unit, its weights' change divided by its bias's change is therefore that row.

An owner of a model that others train can craft the layer so that this happens often: every unit
looks at the mean of the inputs, each with its own threshold, and the next layer treats all units
alike. What one unit changes more than the next one then comes from the rows between their
thresholds (Fowl, Geiping, Czaja, Goldblum, Goldstein, ICLR 2022).
"""

import contextlib
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..algorithms.fedavg import FedAvg
from ..algorithms.federico import FedeRiCo
from ..core.algorithm import AnyAlgorithm, Round, round_of
from ..core.flat import FlatModel
from ..core.policies import governed
from ..core.problem import Problem
from ..core.shards import Shards
from ..core.tree import Tree
from ..engines import EngineSettings, Length, make_engine

NEAR = 0.01  # of the range of inputs: how far any entry of a recovered row may be off
CURIOUS = 0  # the client that crafts a model
Step = Literal["local_epochs", "gradient"]  # of FedeRiCo


def first_layer(model: FlatModel, inputs: int) -> str | None:
    """The name of the first layer with parameters, if it is linear in all inputs and has a bias."""
    name = model.owners()[0]
    layer = model.layer(name)
    fits = isinstance(layer, nn.Linear) and layer.in_features == inputs and layer.bias is not None
    return name if fits else None


def quotients(weights: Tensor, biases: Tensor) -> Tensor:
    """The rows ``[n, inputs]`` that the changes ``[units, inputs]`` and ``[units]`` point at."""
    moved = biases != 0
    return weights[moved] / biases[moved, None]


def recovered(candidates: Tensor, truth: Tensor) -> int:
    """How many rows of ``truth`` have a candidate within NEAR of the range of inputs."""
    candidates = candidates[candidates.isfinite().all(1)]
    if not len(candidates):
        return 0
    apart = torch.cdist(truth.double(), candidates.double(), p=torch.inf).min(1).values
    return int((apart <= NEAR * (truth.max() - truth.min())).sum())


def inverted(problem: Problem, shards: Shards, engine: EngineSettings, batch: int) -> float | None:
    """The share of rows that FedAvg's server recovers if every client takes a step on ``batch``.

    None if the first layer is not linear.
    """
    layer = first_layer(problem.model, problem.shape.numel())
    if layer is None:
        return None
    problem = replace(problem, recipe=replace(problem.recipe, batch=batch, steps=1))
    method = governed(FedAvg(), problem)
    server, states = method.init(problem)
    uploads, round = _answers(method, problem, shards, engine, server, states)
    count = 0
    for w, i in zip(uploads.w, round.clients.tolist(), strict=True):
        change = problem.model.own(w - problem.start)[layer]
        count += recovered(quotients(change["weight"], change["bias"]), _rows(shards, i))
    return count / (batch * len(round.clients))


def crafted(model: FlatModel, start: Tensor, layer: str, rows: Tensor) -> Tensor:
    """A model whose first layer sorts rows by their mean, with thresholds from ``rows``."""
    own = {name: dict(parts) for name, parts in model.own(start).items()}
    following = model.owners()[1] if len(model.owners()) > 1 else None
    units, inputs = own[layer]["weight"].shape
    levels = torch.arange(units, device=start.device, dtype=torch.float64) / units
    thresholds = rows.mean(1).double().quantile(levels).to(start)
    own[layer]["weight"] = torch.full_like(own[layer]["weight"], 1 / inputs)
    own[layer]["bias"] = -thresholds
    if following is not None:
        head = own[following]["weight"]
        own[following]["weight"] = head[:, :1].expand_as(head)
    return model.gathered(own)


def imprinted(problem: Problem, shards: Shards, engine: EngineSettings, step: Step) -> float | None:
    """The share of the others' rows that a client recovers by crafting its model of FedeRiCo.

    All others evaluate it in the first round. None if the first layer is not linear.
    """
    layer = first_layer(problem.model, problem.shape.numel())
    if layer is None:
        return None
    method = governed(FedeRiCo(downloads=problem.population - 1, step=step), problem)
    server, states = method.init(problem)
    model = crafted(problem.model, problem.start, layer, _rows(shards, CURIOUS))
    models = torch.cat([model[None], server.models[1:]])
    server = server._replace(models=models)
    uploads, round = _answers(method, problem, shards, engine, server, states)
    count, of = 0, 0
    for at, i in enumerate(round.clients.tolist()):
        if i != CURIOUS:
            mine = uploads.change.vectors[at][uploads.owner[at] == CURIOUS].sum(0)
            change = problem.model.own(mine)[layer]
            weights, biases = (between(change[name]) for name in ("weight", "bias"))
            truth = _rows(shards, i)
            count, of = count + recovered(quotients(weights, biases), truth), of + len(truth)
    return count / of


def between(change: Tensor) -> Tensor:
    """What each unit changes more than the next one, and the last one alone."""
    return torch.cat([change[:-1] - change[1:], change[-1:]])


def _answers(
    method: AnyAlgorithm,
    problem: Problem,
    shards: Shards,
    settings: EngineSettings,
    server: Tree,
    states: Tree,
) -> tuple[Any, Round]:
    """What all clients answer in the first round."""
    round = round_of(problem, 0, 1, problem.able)
    with contextlib.closing(make_engine(settings, problem, shards, Length(1))) as engine:
        engine.begin(problem, method, states)
        return engine.exchange(method, method.download(server, round), round).uploads, round


def _rows(shards: Shards, client: int) -> Tensor:
    """A client's training rows as a model reads them ``[n, inputs]``."""
    return shards.inputs(shards.splits["train"].of(client)).flatten(1)
