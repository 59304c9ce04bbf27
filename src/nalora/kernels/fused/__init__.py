"""Layers that compute what the model's own do, with fewer passes over memory and the statistics inside."""
