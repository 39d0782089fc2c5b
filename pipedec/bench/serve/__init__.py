"""What the HTTP server costs: its answers beside those of the Python client, on the same cluster."""
