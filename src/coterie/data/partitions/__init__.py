"""One file a family of partitions; the table of them is in :mod:`coterie.data.partition`."""
