"""How a prompt is cut into the chunks that prefill sends through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

PREFILL_CHUNK = 512


def prefill_chunks(token_ids: Sequence[int], num_masks: int = 0) -> list[list[int]]:
    """The prompt in chunks of at most ``PREFILL_CHUNK`` tokens, so that activations of long prompts need no more memory.

    ``num_masks`` mask tokens (ids −1, −2, …) follow the last chunk.
    """
    chunks = [list(token_ids[start : start + PREFILL_CHUNK]) for start in range(0, len(token_ids), PREFILL_CHUNK)]
    chunks[-1] += [-mask for mask in range(1, num_masks + 1)]
    return chunks
