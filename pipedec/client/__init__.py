"""The client's side: requests to a running cluster, and ``LLM``, which starts one of its own."""
