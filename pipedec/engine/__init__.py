"""Wires everything: pipelines in one process or many, the rank processes, the client. The only package that knows both
methods and workers."""
