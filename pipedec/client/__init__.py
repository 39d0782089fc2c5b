"""Clients: requests to a running cluster, and ``LLM``, which starts a cluster of its own."""
