"""Probes a federation: stay local, average, cluster or personalise."""
