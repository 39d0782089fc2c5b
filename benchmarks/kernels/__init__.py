"""Single operations of a stage on one device, timed without a pipeline."""
