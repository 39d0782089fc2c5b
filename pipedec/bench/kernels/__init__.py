"""``pipedec bench operations`` and ``pipedec bench layers``: single operations on one device, timed without a pipeline."""
