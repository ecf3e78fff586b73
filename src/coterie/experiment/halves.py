"""Whether local training helps a newcomer: a check on the halves of its own labelled samples.

For each half, the newcomer joins with that half and trains on it; the other half judges the model
before and after training. Local training helps if there are fewer errors after it, or as many and
a lower loss; in a regression, if the loss is lower.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..algorithms.newcomer_parts import Joined
from ..core import tree
from ..core.algorithm import Mixture
from ..core.batches import shape_of, views
from ..core.client import Client, Clock
from ..core.shards import Ragged
from ..data.simulation import Simulation
from ..engines.evaluation import outputs

FEWEST = 4  # samples of a draw that is checked; with fewer there is no local training


def training_helps(
    on: Simulation, samples: Tensor, rule: Callable[[Client], Joined], index: int
) -> bool:
    """Whether one round of local training after joining pays on samples that were left out."""
    if len(samples) < FEWEST:
        return False
    before, after = [], []
    for half, other in ((samples[0::2], samples[1::2]), (samples[1::2], samples[0::2])):
        client, judge = (_with(on, half, val, index) for val in (half, other))
        joined = rule(client).predictor
        before.append(_cost(judge, joined, on.problem.regression))
        after.append(_cost(judge, trained(client, joined, None), on.problem.regression))
    return _sums(after) < _sums(before)


def trained(client: Client, predictor: Mixture, epochs: int | None) -> Mixture:
    """The predictor, each of its models trained on the client's samples; None: for one round."""
    tuned = client if epochs is None else client.tuned(epochs=epochs)
    return Mixture(predictor.weights, torch.stack([tuned.train(w) for w in predictor.models]))


def client_of(on: Simulation, at: int, index: int) -> Client:
    """One client of a simulation as a method sees it in round ``index``."""
    view = tree.row(views(on.problem, on.shards, [at], index), 0)
    shape = shape_of(on.shards, [at], batched=False)
    return Client(on.problem, on.shards, view, shape, Clock(index, index + 1))


def _with(on: Simulation, train: Tensor, val: Tensor, index: int) -> Client:
    """A client that trains on some samples and validates on others."""
    lists = {"train": train, "val": val, "test": val}
    splits = {name: Ragged([part], on.shards.device) for name, part in lists.items()}
    return client_of(on._replace(shards=replace(on.shards, splits=splits)), 0, index)


def _cost(client: Client, predictor: Mixture, regression: bool) -> tuple[float, float]:
    """The errors, none in a regression, and the loss on the client's validation samples."""
    errors, loss = 0.0, 0.0
    with torch.no_grad():
        for block in client.blocks("val"):
            loss += float(client.mixture_losses(*predictor, block).sum())
            said = outputs(client.model, predictor, block.x, regression)
            if not regression:
                errors += float((said.argmax(-1) != block.y).sum())
    return errors, loss


def _sums(costs: list[tuple[float, float]]) -> tuple[float, float]:
    errors, losses = zip(*costs, strict=True)
    return sum(errors), sum(losses)
