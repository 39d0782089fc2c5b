"""The live view of a pipeline: the feed that rank 0 publishes, its state for those who draw it, the terminal and the page."""
