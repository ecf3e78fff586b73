"""A config's tables, their limits, and what the names in them stand for."""
