"""Formats of weights in files. Knows no torch."""

from pipedec.formats.affine import Affine, Integers
from pipedec.formats.base import (
    ALL_PLAIN,
    DTYPE_BITS,
    FLOATS,
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
    full_name,
    is_stack,
    matrix_shape,
    own_suffix,
)
from pipedec.formats.files import INDEX_FILE, SINGLE_FILE, StoredTensor, TensorFiles, known_files
from pipedec.formats.float8 import Float8
from pipedec.formats.ggml import Ggml, GgufFormats, indexed_formats
from pipedec.formats.quantization import stated_formats
from pipedec.formats.tables import Bnb4, Mxfp4
from pipedec.formats.typical import typical_formats
from pipedec.formats.weights import DTYPE_BYTES, WeightFormat

__all__ = [
    "ALL_PLAIN", "DTYPE_BITS", "DTYPE_BYTES", "FLOATS", "INDEX_FILE", "KERNEL_GROUPS", "PLAIN", "ROUNDED", "SINGLE_FILE",
    "WIDENED_VALUES", "Affine", "AllRounded", "Bnb4", "FileTensor", "Float8", "Format", "Formats", "Ggml", "GgufFormats",
    "Integers", "Mxfp4", "Plain", "Rounded", "StoredTensor", "TensorFiles", "WeightFormat", "file_names", "full_name",
    "indexed_formats", "is_stack", "known_files", "matrix_shape", "own_suffix", "stated_formats", "typical_formats",
]  # fmt: skip
