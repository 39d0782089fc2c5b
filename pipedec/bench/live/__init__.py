"""The live feed: a recording of methods side by side, and what it costs to be watched."""
