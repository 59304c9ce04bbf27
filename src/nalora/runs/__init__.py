"""Runs: their settings, folders, locks and inputs, which training, evaluation and studies share."""
