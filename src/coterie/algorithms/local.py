"""Local: every client trains alone. The baseline of every comparison.

    w_i ← LocalTrain(w_i)
    v_i ← w_i where w_i has the lowest validation loss so far
    prediction: w_i, or v_i where it makes fewer errors on the client's validation data

Travels: nothing. P5 calls it Separate.

Notes:
    The papers print a local model after all of its training, or one that was stopped early. A
    verdict compares with the better one of each client, chosen on validation data, in a tie the
    last (reading G-8). ``keep = "last"`` is P5's Separate.
    A client whose validation data is lent or trained on (``merge_val``) cannot choose by it and
    keeps its last model. So does a client whose batch-norm statistics are kept apart from its
    models (``train.buffers``): these statistics belong to the last model only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Mixture, Round, Traits, rows, single
from ..core.client import Client
from ..core.privacy import Declaration
from ..core.problem import Problem
from ..core.tree import Tree

NO_LOSS = 1e30  # for a client that has not trained yet: above every loss, and finite


class Early(NamedTuple):
    """The model with the lowest validation loss so far."""

    w: Tensor  # [P]
    loss: Tensor  # []


class Own(NamedTuple):
    w: Tensor  # [P]
    early: Tree  # Early, or () where only the last model is kept


@dataclass(frozen=True)
class Local(Algorithm[tuple[()], tuple[()], tuple[()], Own]):
    """Training alone.

    Fields:
        budget: ``full`` trains in every round, ``matched`` in the rounds in which a federated run
            would have sampled the client.
        start: ``common`` starts every client at the same point, ``independent`` at its own.
        keep: ``better`` predicts with the last model or with the early-stopped one, whichever makes
            fewer errors on the client's validation data; ``last`` with the last.
    """

    budget: Literal["matched", "full"] = "full"
    start: Literal["common", "independent"] = "common"
    keep: Literal["better", "last"] = "better"

    paper: ClassVar[str] = "Each client on its own data: the baseline of all five papers"
    private = Declaration((), "")

    @property
    def traits(self) -> Traits:
        """A full budget trains all clients in every round; nothing is shared."""
        return Traits(everybody=self.budget == "full", alone=True)

    def init(self, problem: Problem) -> tuple[tuple[()], Own]:
        K = problem.population
        own = rows(problem.start, K) if self.start == "common" else problem.fresh(torch.arange(K))
        if self.keep == "last":
            return (), Own(own, ())
        return (), Own(own, Early(own, problem.start.new_full((K,), NO_LOSS)))

    def download(self, server: tuple[()], round: Round) -> tuple[()]:
        return ()

    def local(self, client: Client, received: tuple[()], state: Own) -> tuple[tuple[()], Own]:
        w = client.train(state.w)
        if self.keep == "last":
            return (), Own(w, ())
        loss = client.loss(w, "val")
        lower = loss < state.early.loss
        early = Early(torch.where(lower, w, state.early.w), loss.where(lower, state.early.loss))
        return (), Own(w, early)

    def aggregate(self, server: tuple[()], uploads: tuple[()], round: Round) -> tuple[()]:
        return ()

    def serve(self, server: tuple[()], round: Round) -> tuple[()]:
        """Nothing: the client has what it needs."""
        return ()

    def predictor(self, client: Client, served: tuple[()], state: Own) -> Mixture:
        """The last model, or the early-stopped one where that is better."""
        if self.keep == "last" or client.model.apart:
            return single(state.w)
        fewer = client.error(state.early.w, "val") < client.error(state.w, "val")
        return single(torch.where(fewer & client.validated, state.early.w, state.w))
