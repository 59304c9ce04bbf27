"""Gate statistics of a run's checkpoints, compared on the same tokens, one FFN block at a time."""
