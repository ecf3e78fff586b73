"""Adaptations: a client's last step, which personalises the trained model before prediction.

An adapted model is never uploaded: an adaptation changes the predictions, never the training. Any
method can be followed by any adaptation.
"""

from .base import Adaptation, Adapted
from .ewc import ElasticWeights
from .ft import FineTune, FreezeBase
from .kd import Distill
from .knn import NearestNeighbours

__all__ = [
    "ADAPTATIONS",
    "Adaptation",
    "Adapted",
    "Distill",
    "ElasticWeights",
    "FineTune",
    "FreezeBase",
    "NearestNeighbours",
]

ADAPTATIONS: dict[str, type[Adaptation]] = {
    "ft": FineTune,
    "fb": FreezeBase,
    "ewc": ElasticWeights,
    "kd": Distill,
    "knn": NearestNeighbours,
}
