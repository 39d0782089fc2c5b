"""GGUF files (llama.cpp's format of one file for weights, sizes and tokenizer) as Hugging Face checkpoints.

What is not weights is written once into a cache, in the files that a checkpoint's directory has; the weights stay in the GGUF
file. Knows no torch.
"""

from pipedec.gguf.files import NAMED_MODELS, is_gguf, is_installed, is_named, located, model_files
from pipedec.gguf.index import BLOCKS, INDEX_FILE, TensorIndex, TensorPlace, write_quantized

__all__ = [
    "BLOCKS",
    "INDEX_FILE",
    "NAMED_MODELS",
    "TensorIndex",
    "TensorPlace",
    "is_gguf",
    "is_installed",
    "is_named",
    "located",
    "model_files",
    "write_quantized",
]
