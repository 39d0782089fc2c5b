"""Clients of a running cluster: they submit requests to its Redis and read the answers."""
