"""Ranks, shards and wrappers: models that several processes train together."""
