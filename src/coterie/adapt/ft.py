"""Fine-tuning: each client continues to train the model on its own data."""

from dataclasses import dataclass

from torch import Tensor

from ..core.client import Client
from ..core.ranges import CountOrZero, Positive
from ..core.tree import Tree
from .base import Adaptation


@dataclass(frozen=True)
class FineTune(Adaptation):
    """Fine-tuning (ft): train a copy of the model on the client's own data.

    Fields:
        epochs: passes over the client's data; None takes the training recipe's.
        lr: learning rate; None takes the rate of the round.
    """

    epochs: CountOrZero | None = None
    lr: Positive | None = None

    def adapt(self, client: Client, w: Tensor, given: Tree = ()) -> Tensor:
        """Continue training on the client's data."""
        return client.tuned(epochs=self.epochs, lr=self.lr).train(w)
