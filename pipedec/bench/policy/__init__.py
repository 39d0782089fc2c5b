"""``pipedec bench policy``: speculation policies compared offline, on recorded answers of the target."""
