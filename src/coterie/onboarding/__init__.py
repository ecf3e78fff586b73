"""A new client joins a finished run with its own labelled samples."""
