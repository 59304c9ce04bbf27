"""One run: from a flat YAML file to an ordinary adapter, resumable at any moment."""
