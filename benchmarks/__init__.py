"""Experiments of the papers, run from a checkout as ``python -m benchmarks.NAME``: outside the wheel."""
