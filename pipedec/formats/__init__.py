"""Formats of weights in files. Knows no torch."""

from pipedec.formats.base import (
    ALL_PLAIN,
    DTYPE_BITS,
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
from pipedec.formats.quantization import stated_formats
from pipedec.formats.weights import DTYPE_BYTES, WeightFormat

__all__ = [
    "ALL_PLAIN", "DTYPE_BITS", "DTYPE_BYTES", "PLAIN", "ROUNDED", "WIDENED_VALUES", "AllRounded", "FileTensor", "Format",
    "Formats", "Plain", "Rounded", "WeightFormat", "file_names", "stated_formats",
]  # fmt: skip
