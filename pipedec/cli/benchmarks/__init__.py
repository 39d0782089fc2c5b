"""The commands of ``pipedec bench``, one module each."""
