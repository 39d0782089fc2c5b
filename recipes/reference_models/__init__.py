"""The shipped models' training data, made of the Python standard library, and the recipes of pair, draft and BiTA."""
