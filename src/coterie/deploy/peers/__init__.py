"""Peers without a trusted server: an extra that is off unless federation.toml names some."""
