"""Recipes of trained models: those that pipedec ships, and models that answer in decode threads. Not part of the wheel."""
