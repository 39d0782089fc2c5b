"""Formats of weights in files. Knows no torch."""

from pipedec.formats.base import (
    ALL_PLAIN,
    DTYPE_BITS,
    PLAIN,
    ROUNDED,
    WIDENED_VALUES,
    FileTensor,
    Format,
    Formats,
    Plain,
    Rounded,
    file_names,
)
from pipedec.formats.quantization import stated_formats

__all__ = [
    "ALL_PLAIN", "DTYPE_BITS", "PLAIN", "ROUNDED", "WIDENED_VALUES", "FileTensor", "Format", "Formats", "Plain", "Rounded",
    "file_names", "stated_formats",
]  # fmt: skip
