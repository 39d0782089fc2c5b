"""``pipedec bench load``: many requests at once, by how they arrive: what each waits, and what the pipeline yields."""
