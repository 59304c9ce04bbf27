"""Other people's training loops, made nonlinearity-aware in one line."""
