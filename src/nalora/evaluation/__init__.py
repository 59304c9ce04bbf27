"""Evaluate a model on a task: generate answers, score them, and report measures with confidence intervals."""
