"""One module per family of partitions; their registry is :mod:`coterie.data.partition`."""
