"""``pipedec bench sweep``: methods × pipelines × trees × prompts, one row per answer."""
