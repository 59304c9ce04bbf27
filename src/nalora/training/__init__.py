"""Training of a run: from its settings to an ordinary adapter, resumable after every step."""
