"""Loads datasets and divides them among clients: datasets, partitions and federations."""

from .datasets import DATASETS, load
from .federation import Dataset, Federation
from .manifest import ClientRow, describe, emd, manifest, remarks
from .partition import PARTITIONS, federate
from .sources.formats import FORMATS

__all__ = [
    "DATASETS",
    "FORMATS",
    "PARTITIONS",
    "ClientRow",
    "Dataset",
    "Federation",
    "describe",
    "emd",
    "federate",
    "load",
    "manifest",
    "remarks",
]
