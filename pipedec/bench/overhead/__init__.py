"""``pipedec bench overhead``: the fixed cost of a timestep, beside the same messages over bare gloo."""
