"""Datasets, partitions and the federation they make."""

from .datasets import DATASETS, load
from .federation import Dataset, Federation
from .manifest import describe, emd, manifest, remarks
from .partition import PARTITIONS, federate
from .sources.formats import FORMATS

__all__ = [
    "DATASETS",
    "FORMATS",
    "PARTITIONS",
    "Dataset",
    "Federation",
    "describe",
    "emd",
    "federate",
    "load",
    "manifest",
    "remarks",
]
