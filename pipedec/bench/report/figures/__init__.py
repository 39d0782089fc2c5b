"""The figures of ``pipedec bench plot``, one module per kind."""
