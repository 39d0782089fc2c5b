"""Training of drafts, BiTA and models that answer in threads, for any target. Nothing here runs while decoding."""
