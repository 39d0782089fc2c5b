"""Load on recorded answers in computed time."""
