"""``pipedec bench overhead``: the fixed cost of a timestep."""
