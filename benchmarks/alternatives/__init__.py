"""The same prompts through ``transformers`` and pipedec, in one process."""
