"""What the gates did: checkpoints of a run compared on the same tokens, one FFN block at a time."""
