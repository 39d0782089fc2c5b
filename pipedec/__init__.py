"""pipedec: pipeline-parallel speculative decoding of one request over many GPUs."""

__version__ = "0.1.0"
