"""A round as the later ones of a run are: every client has uploaded, and receives what it asks."""

import copy
from dataclasses import replace
from typing import NamedTuple

import torch

from ...core.algorithm import AnyAlgorithm, Round, round_of
from ...core.task import Task
from ...core.tree import Tree
from ...engines.loop import LoopEngine

BEFORE, HORIZON = 2, 100


class Steady(NamedTuple):
    """All that a round begins with."""

    task: Task
    method: AnyAlgorithm
    server: Tree
    states: Tree
    round: Round


def steady(method: AnyAlgorithm, task: Task) -> Steady:
    """The state of a run after a few rounds, which were short: one step a client."""
    short = copy.copy(task)
    short.recipe = replace(task.recipe, steps=1)
    engine = LoopEngine(short)
    everybody = torch.arange(task.population, device=task.device)
    server, states = method.init(short)
    for index in range(BEFORE):
        round = round_of(short, index, HORIZON, everybody)
        received = method.download(server, round)
        uploads, states = engine.local(method, received, states, round)
        server = method.aggregate(server, uploads, round)
    return Steady(task, method, server, states, round_of(task, BEFORE, HORIZON, everybody))
