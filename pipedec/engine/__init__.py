"""What every rank does with its tasks, and the same pipeline in one process.

The only package that knows both methods and workers.
"""
