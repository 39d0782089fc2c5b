"""Training of the models the project ships. Knows corpora and optimisers; nothing here runs while decoding."""
