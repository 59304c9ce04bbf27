"""Studies: many runs of one question, and what their results can and cannot say."""
