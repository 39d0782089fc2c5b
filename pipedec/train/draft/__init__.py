"""Continued training of a draft against its frozen target."""
