"""Speculation policies compared offline, on recorded answers of the target."""
