"""The tasks of every rank, and the same pipeline in one process.

The only package that knows both methods and workers.
"""
