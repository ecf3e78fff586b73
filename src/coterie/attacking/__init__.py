"""Attacks on methods: who is hurt when some clients lie."""
