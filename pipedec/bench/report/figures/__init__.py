"""Figures: what they have in common, and those of ``pipedec bench plot``."""
