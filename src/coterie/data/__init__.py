"""Loads datasets and divides them among clients: datasets, partitions and federations."""

from .datasets import DATASETS, FORMATS, DatasetReader, load
from .federation import Dataset, Federation
from .manifest import ClientRow, describe, emd, manifest
from .partition import PARTITIONS, federate
from .partitions.base import Partition, Quota
from .streamed import Streamed

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
    "Streamed",
    "describe",
    "emd",
    "federate",
    "load",
    "manifest",
]
