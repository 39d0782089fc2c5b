"""The loops of the ranks of a cluster, and the same pipeline in one process.

The only package that knows both decoding methods and stage workers.
"""
