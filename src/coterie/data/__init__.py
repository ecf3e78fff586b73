"""Datasets, partitions and the federation they make."""
