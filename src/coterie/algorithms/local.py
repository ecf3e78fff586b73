"""Local: every client trains alone. The row that every comparison needs.

    w_i ← LocalTrain(w_i)

Travels: nothing. P5 calls it Separate.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..algorithm import OwnModel, Round, rows
from ..client import Client
from ..task import Task


class Own(NamedTuple):
    """What a client keeps."""

    w: Tensor  # [P]


@dataclass(frozen=True)
class Local(OwnModel[tuple[()], tuple[()], tuple[()], Own]):
    """Training alone.

    Fields:
        budget: ``matched`` trains in the rounds in which a federated run would have sampled the
            client, ``full`` in every round.
        start: ``common`` starts every client at the same point, ``independent`` at its own.
    """

    budget: Literal["matched", "full"] = "matched"
    start: Literal["common", "independent"] = "common"

    paper: ClassVar[str] = "Each client on its own data: the baseline of all five papers"

    @property
    def everybody(self) -> bool:
        """A full budget trains everybody in every round."""
        return self.budget == "full"

    def init(self, task: Task) -> tuple[tuple[()], Own]:
        """A model for every client."""
        if self.start == "independent":
            return (), Own(task.fresh(torch.arange(task.population)))
        return (), Own(rows(task.start, task.population))

    def download(self, server: tuple[()], round: Round) -> tuple[()]:
        """Nothing."""
        return ()

    def local(self, client: Client, received: tuple[()], state: Own) -> tuple[tuple[()], Own]:
        """Train on."""
        return (), Own(client.train(state.w))

    def aggregate(self, server: tuple[()], uploads: tuple[()], round: Round) -> tuple[()]:
        """Nothing."""
        return ()

    def model(self, state: Own) -> Tensor:
        """The client's own model."""
        return state.w
