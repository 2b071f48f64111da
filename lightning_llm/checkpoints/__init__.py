"""Files of a run: atomic writing, reading and validating, sharded checkpoints, run directories."""
