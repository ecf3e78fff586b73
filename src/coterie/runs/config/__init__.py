"""The config of a run: tables, defaults, ranges and checks."""
