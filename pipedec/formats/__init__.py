"""Formats of weights in files. Knows no torch."""

from pipedec.formats.affine import Affine, Integers
from pipedec.formats.base import (
    ALL_PLAIN,
    DTYPE_BITS,
    KERNEL_GROUPS,
    PLAIN,
    ROUNDED,
    WIDENED_VALUES,
    AllRounded,
    FileTensor,
    Format,
    Formats,
    Plain,
    Rounded,
    file_names,
)
from pipedec.formats.ggml import Ggml, GgufFormats, indexed_formats
from pipedec.formats.quantization import stated_formats
from pipedec.formats.weights import DTYPE_BYTES, WeightFormat

__all__ = [
    "ALL_PLAIN", "DTYPE_BITS", "DTYPE_BYTES", "KERNEL_GROUPS", "PLAIN", "ROUNDED", "WIDENED_VALUES", "Affine", "AllRounded",
    "FileTensor", "Format", "Formats", "Ggml", "GgufFormats", "Integers", "Plain", "Rounded", "WeightFormat", "file_names",
    "indexed_formats", "stated_formats",
]  # fmt: skip
