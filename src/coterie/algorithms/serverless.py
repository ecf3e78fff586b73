"""Methods whose server half every client can compute for itself, without a server."""

from abc import ABC, abstractmethod

from torch import Tensor

from ..core.algorithm import Round
from ..core.problem import Problem
from .federico_forms import Held, Returned
from .federico_weights import Tracked


class Serverless(ABC):
    """What a client computes of the server half where it owns its model.

    What is returned to an owner is added in the order of client numbers, so that an owner which
    computes alone gets the bits of :meth:`Algorithm.aggregate`.
    """

    @property
    @abstractmethod
    def serverless(self) -> bool:
        """Whether the method, as it is configured, needs no server."""

    @property
    @abstractmethod
    def predictable_noise(self) -> bool:
        """Whether clients add noise that is derived from the seed of the run."""

    @abstractmethod
    def begin(self, problem: Problem, clients: Tensor) -> tuple[Held, Tracked]:
        """The models and states with which some clients begin, one row per client."""

    @abstractmethod
    def moved(self, held: Held, returned: Returned, sizes: Tensor, round: Round) -> Held:
        """The owners' models after a round; ``held`` and ``sizes`` have one row per owner."""
