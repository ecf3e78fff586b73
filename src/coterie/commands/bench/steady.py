"""The state of a run after a few rounds, so that the timed round is like the later ones.

Every client has uploaded by then, and receives the models that it asks for.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from ...core.algorithm import AnyAlgorithm, Round, round_of
from ...core.tree import Tree
from ...data.simulation import Simulation
from ...engines.loop import LoopBackend

BEFORE, HORIZON = 2, 100


class Steady(NamedTuple):
    """Everything that a round starts from."""

    on: Simulation
    method: AnyAlgorithm
    server: Tree
    states: Tree
    round: Round


def steady(method: AnyAlgorithm, on: Simulation) -> Steady:
    """The state of a run after a few short rounds of one step per client."""
    problem = on.problem
    short = replace(problem, recipe=replace(problem.recipe, steps=1))
    backend = LoopBackend(short, on.shards)
    everybody = torch.arange(problem.population, device=problem.device)
    server, states = method.init(short)
    for index in range(BEFORE):
        round = round_of(short, index, HORIZON, everybody)
        received = method.download(server, round)
        uploads, states = backend.local(method, received, states, round)
        server = method.aggregate(server, uploads, round)
    return Steady(on, method, server, states, round_of(problem, BEFORE, HORIZON, everybody))
