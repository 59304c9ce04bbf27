"""Layers that compute the same as the model's own, with less memory traffic and with the gate statistics."""
