"""Checkpoints as files: where their tensors are, which of them a rank reads, which files a host lacks, digests. No torch."""

from pipedec.checkpoints.digests import (
    Digests,
    combined,
    config_digest,
    fingerprint,
    quick_digest,
    tensor_digests,
    weight_files,
    weights_digest,
)
from pipedec.checkpoints.parts import (
    Part,
    Span,
    check_here,
    has_weights,
    is_whole,
    merged,
    missing_files,
    part_digests,
    rank_parts,
)
from pipedec.checkpoints.tensors import INDEX_FILE, SINGLE_FILE, StoredTensor, TensorFiles

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "Digests",
    "Part",
    "Span",
    "StoredTensor",
    "TensorFiles",
    "check_here",
    "combined",
    "config_digest",
    "fingerprint",
    "has_weights",
    "is_whole",
    "merged",
    "missing_files",
    "part_digests",
    "quick_digest",
    "rank_parts",
    "tensor_digests",
    "weight_files",
    "weights_digest",
]
