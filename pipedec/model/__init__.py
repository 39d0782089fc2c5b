"""The stage model: some layers of a LLaMA-family checkpoint, with a two-level cache and tree attention.

Knows tensors and Hugging Face checkpoints; knows neither the cluster, nor tokenizers, nor the decoding method.
"""
