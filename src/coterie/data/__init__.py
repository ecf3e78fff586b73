"""Loads datasets and divides them among clients: datasets, partitions and federations."""

from .assign import Quota
from .datasets import DATASETS, DatasetReader, load
from .federation import Dataset, Federation
from .manifest import ClientRow, describe, emd, manifest, remarks
from .partition import PARTITIONS, federate
from .partitions.base import Partition
from .sources.formats import FORMATS

__all__ = [
    "DATASETS",
    "FORMATS",
    "PARTITIONS",
    "ClientRow",
    "Dataset",
    "DatasetReader",
    "Federation",
    "Partition",
    "Quota",
    "describe",
    "emd",
    "federate",
    "load",
    "manifest",
    "remarks",
]
