"""From a config to finished runs and their folders."""
