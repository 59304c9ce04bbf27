"""Load models, check them and name their layers."""
