"""Processes, sharded parameters and wrappers of distributed training."""
