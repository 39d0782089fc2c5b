"""The live view of a pipeline: the feed that rank 0 publishes, its readers' figures, and the page."""
