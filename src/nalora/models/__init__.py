"""Real models that work without a hub."""
