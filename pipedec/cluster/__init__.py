"""A cluster on one machine or under torchrun: rank processes, their leases, where a running cluster is."""
