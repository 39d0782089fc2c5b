"""Answers that follow a JSON Schema, compared with the same methods' answers without one."""
