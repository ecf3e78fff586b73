"""Adaptation: what a client does to the finished predictor before it uses it.

Nothing that is adapted is ever uploaded: adapting changes what predicts, never the run. Any method
can be followed by any adaptation (spec 3).
"""

from .base import Adaptation, Adapted
from .ewc import ElasticWeights
from .fb import FreezeBase
from .ft import FineTune
from .kd import Distill

__all__ = [
    "ADAPTATIONS",
    "Adaptation",
    "Adapted",
    "Distill",
    "ElasticWeights",
    "FineTune",
    "FreezeBase",
]

ADAPTATIONS: dict[str, type[Adaptation]] = {
    "ft": FineTune,
    "fb": FreezeBase,
    "ewc": ElasticWeights,
    "kd": Distill,
}
