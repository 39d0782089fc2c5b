"""Skeleton-of-Thought beside decode threads."""
