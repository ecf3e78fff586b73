"""Readers of data files: one module per file format, and the places of known datasets."""
