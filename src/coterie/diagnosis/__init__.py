"""Checks a config and its data before training."""
