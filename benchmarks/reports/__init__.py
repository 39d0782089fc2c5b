"""Figures and tables of the papers, from the rows of sweeps."""
