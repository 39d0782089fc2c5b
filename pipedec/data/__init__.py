"""Prompt files."""
