"""Answers in one decode thread and in several, with speculation and without."""
