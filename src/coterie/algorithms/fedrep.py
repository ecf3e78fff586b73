"""FedRep: each client first trains its own head, then the shared base.

    head_i ← E_h epochs on the head, base frozen as received
    base_i ← E_b epochs on the base, head_i frozen
    base   ← base + Σ_i p_i (base_i − base)                         on the server

Travels: the base, both ways. The head never leaves the client.

Notes:
    The paper counts SGD steps on the head; E_h = 10 epochs and E_b = 1 are ours (reading B-2). Both
    replace the recipe's epochs (or steps).
    Each phase has minibatches and an optimiser state of its own, and frozen parameters change
    neither by momentum nor by weight decay. Batch-norm statistics change with their layer.
    The rest is as in FedPer.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.client import Client
from ..core.privacy import Declaration, Query
from ..core.problem import Problem
from ..core.ranges import CountOrZero
from .fedper import PersonalHead
from .lgfedavg import Parts


@dataclass(frozen=True)
class FedRep(PersonalHead):
    """Shared representation, personal head, in two phases.

    Fields:
        head_epochs: passes E_h over the client's data for the head.
        base_epochs: passes E_b for the base.
    """

    head_epochs: CountOrZero = 10
    base_epochs: CountOrZero = 1

    bibtex: ClassVar[str] = """@inproceedings{collins2021fedrep,
  title={Exploiting Shared Representations for Personalized Federated Learning},
  author={Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle={ICML}, year={2021}}"""
    private = Declaration(lambda self, when: (Query(self.head_epochs), Query(self.base_epochs)))

    def optimizers(self, problem: Problem) -> int:
        return 2  # of the head and of the base

    def trained(self, client: Client, w: Tensor, at: Parts) -> Tensor:
        w = client.tuned(epochs=self.head_epochs, batches="head").train(w, only=at.is_upper)
        return client.tuned(epochs=self.base_epochs).train(w, only=~at.is_upper)
