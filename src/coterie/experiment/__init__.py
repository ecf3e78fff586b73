"""From a config to a finished run's folder: assemble, run, check-point, resume."""
