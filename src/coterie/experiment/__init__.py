"""From a config to the folder of a finished run: assemble, run, checkpoint, resume."""
