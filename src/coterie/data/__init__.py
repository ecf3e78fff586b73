"""Datasets, partitions and the federation they make."""

from .datasets import DATASETS, load
from .federation import Dataset, Federation
from .partition import PARTITIONS, federate

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "Federation", "federate", "load"]
