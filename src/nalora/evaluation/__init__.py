"""Ask a model a task's questions and say how well it did, with intervals."""
