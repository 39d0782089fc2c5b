"""How often the ranks wait for their device: every read of a value that is computed there."""
