"""A threaded answer as one sequence of tensors, for training and for tests: token ids, positions, attention mask, targets.

Shapes: P prompt tokens, A tokens of the document, N = P + A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.threads.sequence import Sequence

IGNORED = -100  # ``ignore_index`` of torch's cross-entropy


@dataclass(frozen=True)
class Flattened:
    """Prompt and answer, in document order.

    Attributes:
        token_ids: int64 [N].
        positions: int64 [N], position ids.
        mask: bool [N, N], ``mask[i, j]``: token i attends to token j.
        targets: int64 [N], the next token of the same thread; IGNORED inside the prompt and at the end of a thread. So a forced
            token is never a target (APAR §2.2), and the target of an opener is the next token of its own thread (PASTA §4).
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor


def visibility(sequence: Sequence) -> Tensor:
    """The attention mask over the document: bool [A, A], ``[i, j]``: token i attends to token j. All attend to the prompt."""
    document = sequence.document()
    indices = _document_indices(sequence)
    mask = torch.zeros(len(document), len(document), dtype=torch.bool)
    for row, token in enumerate(document):
        for number, count in sequence.sees(token.thread, token.ordinal):
            mask[row, indices[number][:count]] = True
    return mask


def flatten(sequence: Sequence, prompt_token_ids: list[int]) -> Flattened:
    """Prompt and answer as one sequence.

    Raises:
        ValueError: the length of the prompt is not ``sequence.prompt_length``.
    """
    prompt = len(prompt_token_ids)
    if prompt != sequence.prompt_length:
        raise ValueError(f"the prompt has {prompt} tokens, but the sequence expects {sequence.prompt_length}")
    document = sequence.document()
    length = prompt + len(document)
    positions = [sequence.threads[token.thread].positions[token.ordinal] for token in document]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[prompt:, prompt:] = visibility(sequence)
    targets = torch.full((length,), IGNORED)
    for number, indices in _document_indices(sequence).items():
        own = torch.tensor(sequence.threads[number].token_ids[: len(indices)])
        targets[prompt + indices[:-1]] = own[1:]
        if number == 0 and prompt:
            targets[prompt - 1] = own[0]
    return Flattened(
        torch.tensor([*prompt_token_ids, *(token.token_id for token in document)], dtype=torch.int64),
        torch.tensor([*range(prompt), *positions], dtype=torch.int64),
        mask,
        targets,
    )


def _document_indices(sequence: Sequence) -> dict[int, Tensor]:
    """By thread, int64: the indices of its tokens in the document."""
    indices: dict[int, list[int]] = {}
    for index, token in enumerate(sequence.document()):
        indices.setdefault(token.thread, []).append(index)
    return {number: torch.tensor(own) for number, own in indices.items()}
