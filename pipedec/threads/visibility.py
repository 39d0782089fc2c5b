"""An answer as one sequence of tensors, for training and for tests: token ids, positions, who sees whom, what comes next.

Shapes: P prompt tokens, A tokens of the document, N = P + A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.threads.sequence import Sequence

IGNORED = -100  # what torch's cross-entropy ignores


@dataclass(frozen=True)
class Flattened:
    """Prompt and answer, in document order.

    Attributes:
        token_ids: int64 [N].
        positions: int64 [N].
        mask: bool [N, N], ``mask[i, j]`` = token i sees token j.
        targets: int64 [N], the token that its thread says next, and IGNORED where none does: inside the prompt, at the end of a
            thread. Forced tokens are nobody's target (APAR §2.2), and an opener's is what its own thread says behind it
            (PASTA §4).
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor


def visibility(sequence: Sequence) -> Tensor:
    """bool [A, A] over the document, ``[i, j]`` = token i sees token j. All see the prompt."""
    written = sequence.document()
    places = _places(sequence)
    mask = torch.zeros(len(written), len(written), dtype=torch.bool)
    for row, token in enumerate(written):
        for number, count in sequence.sees(token.thread, token.ordinal):
            mask[row, places[number][:count]] = True
    return mask


def flatten(sequence: Sequence, prompt_token_ids: list[int]) -> Flattened:
    """Prompt and answer as one sequence. Raises ValueError if the prompt has another length than the sequence's."""
    prompt = len(prompt_token_ids)
    if prompt != sequence.prompt_length:
        raise ValueError(f"a prompt of {prompt} tokens for a sequence behind {sequence.prompt_length}")
    written = sequence.document()
    length = prompt + len(written)
    positions = [sequence.threads[token.thread].positions[token.ordinal] for token in written]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[prompt:, prompt:] = visibility(sequence)
    targets = torch.full((length,), IGNORED)
    for number, places in _places(sequence).items():
        told = torch.tensor(sequence.threads[number].token_ids[: len(places)])
        targets[prompt + places[:-1]] = told[1:]
        if number == 0 and prompt:
            targets[prompt - 1] = told[0]
    return Flattened(
        torch.tensor([*prompt_token_ids, *(token.token_id for token in written)], dtype=torch.int64),
        torch.tensor([*range(prompt), *positions], dtype=torch.int64),
        mask,
        targets,
    )


def _places(sequence: Sequence) -> dict[int, Tensor]:
    """Where the tokens of each thread stand in the document."""
    places: dict[int, list[int]] = {}
    for place, token in enumerate(sequence.document()):
        places.setdefault(token.thread, []).append(place)
    return {number: torch.tensor(found) for number, found in places.items()}
