"""Readers: one module per file format, and where the files of known datasets are found."""
