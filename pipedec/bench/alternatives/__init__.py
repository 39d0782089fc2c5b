"""``pipedec bench alternatives``: the same prompts through ``transformers`` and pipedec, in one process."""
