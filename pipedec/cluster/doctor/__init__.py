"""Checks before a run starts: facts about a host, findings about the facts, and the hosts of a cluster.yaml compared.

Changes nothing on a host and starts no rank.
"""
