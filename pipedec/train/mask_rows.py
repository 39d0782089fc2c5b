"""BiTA's rows and parameters (BiTA §3.1): groups of masks after places of samples, and the two forward passes that compute them
in all layers of a target or in those of a stage.

Rows, positions and visibility come from ``pipedec.tree``, as in decoding. Knows transformers' models and caches, but no losses,
steps or files. Shapes: B samples, T tokens of the longest, R maximum mask rows of a sample, G groups, M masks in a group,
Q tokens of the learned prompt; L layers, K key-value heads, D head size, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pipedec.checkpoints import LayerSpan
from pipedec.families.skeleton import module_cache
from pipedec.model.bita import BitaWeights
from pipedec.train.continuations import Continuation
from pipedec.tree.masks import is_mask, mask_groups, visible_slots
from pipedec.tree.prediction_tree import PredictionTree

NO_LABEL = -100
TOKENS_PER_FORWARD = 2048
Past = dict[int, tuple[Tensor, Tensor]]  # keys and values of each of the layers, by its number, [B, K, T, D] each


@dataclass(frozen=True)
class MaskRows:
    """Mask rows of a batch and what they need; both dimensions are padded at the end."""

    tokens: Tensor  # int64 [B, T]
    masks: Tensor  # int64 [B, R], the number of each row's mask in its group, from 0
    positions: Tensor  # int64 [B, R]
    visible: Tensor  # bool [B, R, Q + T + R]: the learned prompt, the tokens, the rows themselves. A padded row sees itself
    labels: Tensor  # int64 [B, R], the token after each row's position; ``NO_LABEL`` past the sample's end and in padding
    before: Tensor  # int64 [B, R], the token at each row's position, if the row has a label

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
    """A group of ``num_masks`` after each of ``places`` (int64, one tensor for each sample)."""
    parts = [_rows_of(sample, at, num_masks, num_prompt_tokens) for sample, at in zip(samples, places, strict=True)]
    tokens = pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True)
    masks, positions, before = (
        pad_sequence([part[key] for part in parts], batch_first=True) for key in ("masks", "positions", "before")
    )
    labels = pad_sequence([part["labels"] for part in parts], batch_first=True, padding_value=NO_LABEL)
    context, num_rows = num_prompt_tokens + tokens.shape[1], masks.shape[1]
    visible = torch.zeros(len(samples), num_rows, context + num_rows, dtype=torch.bool)
    for seen, part in zip(visible, parts, strict=True):
        rows, slots = part["visible"].shape
        seen[:rows, : slots - rows] = part["visible"][:, : slots - rows]
        seen[:rows, context : context + rows] = part["visible"][:, slots - rows :]
        seen[:, context:].fill_diagonal_(True)
    return MaskRows(tokens, masks, positions, visible, labels, before)


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
        "before": ids[positions.clamp(max=len(ids) - 1)],
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


class TargetLayers:
    """The layers of a frozen target on this stage: all of them, or those of a ``span`` (see ``load_transformers``)."""

    def __init__(self, target: Any, span: LayerSpan | None = None) -> None:
        self._target, self.config = target, target.config.get_text_config()
        self.span = span or LayerSpan(range(self.config.num_hidden_layers), True, True)
        self.dtype: torch.dtype = target.dtype
        self.device = next(target.get_decoder().parameters()).device
        self.inputs: Tensor | None = target.get_input_embeddings().weight if self.span.first else None  # [V, E]
        self.outputs: Tensor | None = target.get_output_embeddings().weight if self.span.last else None  # [V, E]

    def prompt_shape(self, num_prompt_tokens: int) -> tuple[int, ...]:
        """[L, 2, K, Q, D] of the whole target."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers, 2, config.num_key_value_heads, num_prompt_tokens, head_dim

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, E], on the first stage."""
        hidden: Tensor = self._target.get_input_embeddings()(tokens_BT)
        return hidden

    def token_pass(self, hidden_BTE: Tensor, **rows: Tensor) -> tuple[Tensor, Past]:
        """The ordinary rows after these layers, and their keys and values. They attend to neither masks nor prompt, so training
        does not change them: compute them without gradients.
        """
        past: Past = {}

        def update(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            past[layer] = keys, values
            return keys, values

        return self._computed(hidden_BTE, update, **rows), past

    def mask_pass(self, hidden_BRE: Tensor, prompt: Tensor, rows: MaskRows, past: Past) -> Tensor:
        """The mask rows after these layers, [B, R, E]. Gradients flow into ``prompt``, of all layers, and ``hidden_BRE``."""

        def update(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            learned = prompt[layer].to(self.dtype)[:, None].expand(-1, len(keys), -1, -1, -1)
            return torch.cat((learned[0], past[layer][0], keys), 2), torch.cat((learned[1], past[layer][1], values), 2)

        return self._computed(hidden_BRE, update, position_ids=rows.positions, attention_mask=rows.visible[:, None])

    def logits(self, hidden_BRE: Tensor, rows: MaskRows) -> Tensor:
        """Logits of the rows with a label, in order: [labelled, V], on the last stage."""
        logits: Tensor = self._target.get_output_embeddings()(hidden_BRE[rows.labelled]).float()
        return logits

    def folded(self, embeddings_QE: Tensor) -> Tensor:
        """Keys and values that all layers compute from prompt embeddings, with causal attention, all at position 0:
        [L, 2, K, Q, D].

        The rotary embedding is the identity at position 0, so these keys are like those of a ``deep`` prompt.
        """
        num_tokens, device = len(embeddings_QE), embeddings_QE.device
        if not num_tokens:
            return embeddings_QE.new_zeros(self.prompt_shape(0))
        visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
        position_ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
        embeddings_1QE = embeddings_QE[None].to(self.dtype)
        _, found = self.token_pass(embeddings_1QE, position_ids=position_ids, attention_mask=visible[None, None])
        return torch.stack([torch.stack((keys[0], values[0])) for keys, values in found.values()])

    def _computed(self, hidden: Tensor, update: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]], **rows: Tensor) -> Tensor:
        self._target.received = hidden
        output = self._target.get_decoder()(inputs_embeds=hidden, past_key_values=module_cache(update), use_cache=True, **rows)
        computed: Tensor = output.last_hidden_state
        return computed


class Learned(nn.Module):
    """Mask embeddings and a prompt, in float32, the same on all stages.

    The prompt is keys and values of every layer (``deep``), or input embeddings from which the layers compute them (``shallow``).
    Initial values are normal noise of standard deviation ``start_std``.
    """

    def __init__(
        self, target: TargetLayers, num_masks: int, num_prompt_tokens: int, prompting: str, start_std: float, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden = target.config.hidden_size
        self.is_deep = prompting != "shallow"
        shape = target.prompt_shape(num_prompt_tokens) if self.is_deep else (num_prompt_tokens, hidden)
        self.masks = nn.Parameter(torch.randn(num_masks, hidden, generator=generator) * start_std)
        self.prompt = nn.Parameter(torch.randn(shape, generator=generator) * start_std)

    @classmethod
    def frozen(cls, target: TargetLayers, weights: BitaWeights) -> Learned:
        """Trained ones, which learn nothing more."""
        learned = cls(target, weights.num_masks, weights.prompt.shape[3], "deep", 0.0, 0).requires_grad_(False)
        learned.prompt.copy_(weights.prompt)
        learned.masks.copy_(weights.masks)
        return learned.to(target.device)

    def prompt_of(self, target: TargetLayers) -> Tensor:
        """[L, 2, K, Q, D], with gradients."""
        return self.prompt if self.is_deep else target.folded(self.prompt)

    @torch.no_grad()
    def rounded(self, target: TargetLayers) -> BitaWeights:
        """The weights as they are stored: in the format of decoding, in bfloat16."""
        return BitaWeights(self.prompt_of(target).to(torch.bfloat16), self.masks.detach().to(torch.bfloat16))
