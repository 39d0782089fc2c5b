"""``pipedec serve``: the OpenAI HTTP API in front of a running cluster. Loads no torch and no checkpoint but the tokenizer."""
