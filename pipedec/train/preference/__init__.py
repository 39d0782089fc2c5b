"""PASTA's second stage: preferring a model's quick and good answers to its slow or bad ones."""
