"""Training data for threads: questions with answers, annotated with the parts that can be decoded in parallel."""
