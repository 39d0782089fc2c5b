"""Training of drafts and BiTA, for any target. Nothing here runs while decoding."""
