"""Checkpoints as files: where their tensors are, which of them a rank reads, which files a host lacks, digests. No torch."""

from pipedec.checkpoints.digests import (
    COPY_AGAIN,
    TensorDigests,
    combined,
    config_digest,
    fingerprint,
    first_difference,
    sample_digest,
    weight_files,
    weights_digest,
)
from pipedec.checkpoints.known import KnownTensors
from pipedec.checkpoints.parts import (
    CheckpointPart,
    LayerSpan,
    check_here,
    check_trained_for,
    has_weights,
    merged,
    part_digests,
    rank_parts,
    span_shapes,
    stored_tensors,
)
from pipedec.formats import INDEX_FILE, SINGLE_FILE, StoredTensor, TensorFiles

__all__ = [
    "COPY_AGAIN", "INDEX_FILE", "SINGLE_FILE", "CheckpointPart", "KnownTensors", "LayerSpan", "StoredTensor", "TensorDigests",
    "TensorFiles", "check_here", "check_trained_for", "combined", "config_digest", "fingerprint", "first_difference",
    "has_weights", "merged", "part_digests", "rank_parts", "sample_digest", "span_shapes", "stored_tensors", "weight_files",
    "weights_digest",
]  # fmt: skip
