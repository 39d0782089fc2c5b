"""``pipedec bench threads``: answers in one decode thread and in several, with speculation and without."""
