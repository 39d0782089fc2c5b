"""Groups of masks behind places of samples (BiTA §3.1), as tensors for one forward of a batch.

Rows, positions and visibility come from ``pipedec.tree``, as in decoding. Knows neither models nor losses. Shapes: B samples,
T tokens of the longest, R maximum mask rows of a sample, G groups, M masks in a group, Q tokens of the learned prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipedec.train.continuations import Continuation
from pipedec.tree.masks import is_mask, mask_groups, visible_slots
from pipedec.tree.prediction_tree import PredictionTree

NO_LABEL = -100
TOKENS_PER_FORWARD = 2048


@dataclass(frozen=True)
class MaskRows:
    """Mask rows of a batch and what they need; both dimensions are padded at the end.

    Attributes:
        tokens: int64 [B, T].
        masks: int64 [B, R], the number of each row's mask in its group, from 0.
        positions: int64 [B, R].
        visible: bool [B, R, Q + T + R]: the learned prompt, the tokens, the rows themselves. A padded row sees itself.
        labels: int64 [B, R], the token after each row's position; ``NO_LABEL`` past the sample's end and in padding.
    """

    tokens: Tensor
    masks: Tensor
    positions: Tensor
    visible: Tensor
    labels: Tensor

    @property
    def labelled(self) -> Tensor:
        """bool [B, R]."""
        return self.labels != NO_LABEL

    def on(self, device: torch.device) -> MaskRows:
        """The same rows on another device."""
        return MaskRows(*(tensor.to(device) for tensor in vars(self).values()))


def places_of(sample: Continuation) -> Tensor:
    """Positions that a group may follow: the last prompt token and all answer tokens after which the first mask has a label."""
    return torch.arange(sample.prompt_length - 1, len(sample.ids) - 2)


def draw_places(sample: Continuation, groups: int, generator: torch.Generator) -> Tensor:
    """Up to ``groups`` random places of the sample, in order: int64 [G]."""
    places = places_of(sample)
    return places[torch.randperm(len(places), generator=generator)[:groups]].sort().values


def mask_rows(samples: list[Continuation], places: list[Tensor], num_masks: int, num_prompt_tokens: int) -> MaskRows:
    """A group of ``num_masks`` behind each of ``places`` (int64, one tensor for each sample)."""
    parts = [_rows_of(sample, at, num_masks, num_prompt_tokens) for sample, at in zip(samples, places, strict=True)]
    tokens = pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True)
    masks, positions = (pad_sequence([part[key] for part in parts], batch_first=True) for key in ("masks", "positions"))
    labels = pad_sequence([part["labels"] for part in parts], batch_first=True, padding_value=NO_LABEL)
    context, num_rows = num_prompt_tokens + tokens.shape[1], masks.shape[1]
    visible = torch.zeros(len(samples), num_rows, context + num_rows, dtype=torch.bool)
    for seen, part in zip(visible, parts, strict=True):
        rows, slots = part["visible"].shape
        seen[:rows, : slots - rows] = part["visible"][:, : slots - rows]
        seen[:rows, context : context + rows] = part["visible"][:, slots - rows :]
        seen[:, context:].fill_diagonal_(True)
    return MaskRows(tokens, masks, positions, visible, labels)


def _rows_of(sample: Continuation, places: Tensor, num_masks: int, num_prompt_tokens: int) -> dict[str, Tensor]:
    """The mask rows of one sample: its answer is a chain of the tree, whose root is the last prompt token."""
    ids = torch.tensor(sample.ids)
    past_length = sample.prompt_length - 1
    tree = PredictionTree(block=len(ids) - past_length + len(places) * num_masks)
    tree.reset(past_length)
    tree.plant(int(ids[past_length]))
    tree.append(ids[sample.prompt_length :], torch.arange(len(ids) - sample.prompt_length))
    rows = tree.append(*mask_groups(places - past_length, tree.num_rows, num_masks))
    positions = tree.positions[rows]
    following = positions + 1
    token_ids = tree.token_ids[rows]
    return {
        "masks": -token_ids - 1,
        "positions": positions,
        "visible": visible_slots(tree.tree_mask[rows], is_mask(token_ids), num_prompt_tokens, past_length),
        "labels": torch.where(following < len(ids), ids[following.clamp(max=len(ids) - 1)], NO_LABEL),
    }


def sample_batches(
    drawn: list[tuple[Continuation, Tensor]], num_masks: int, most: int = TOKENS_PER_FORWARD
) -> Iterator[tuple[list[Continuation], list[Tensor]]]:
    """The samples and their places in forward passes of at most so many tokens and mask rows, with their padding, samples of
    similar length together.
    """
    piece: list[tuple[Continuation, Tensor]] = []
    rows = 0
    for sample, places in sorted(drawn, key=lambda pair: len(pair[0].ids)):
        widest = max(rows, len(places) * num_masks)
        if piece and (len(piece) + 1) * (len(sample.ids) + widest) > most:
            yield [found for found, _ in piece], [at for _, at in piece]
            piece, widest = [], len(places) * num_masks
        piece.append((sample, places))
        rows = widest
    if piece:
        yield [found for found, _ in piece], [at for _, at in piece]
