"""Ollama's API: chats, continuations of prompts, and lists of models."""
