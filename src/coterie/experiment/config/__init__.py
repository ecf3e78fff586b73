"""Configs: their tables, the ranges of their fields, and the lookup of the names in them."""
