"""Compares a pipeline's answer with the one that the target generates in ``transformers``, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pipedec.core import SamplingParams
from pipedec.engine.admission import Sequences
from pipedec.engine.build import DTYPES
from pipedec.engine.devices import chosen_device
from pipedec.model import load_transformers, rounded
from pipedec.plan.spec import PipelineSpec
from pipedec.verify.divergence import Divergence, first_difference
from pipedec.verify.threads import naive_threads


class Reference:
    """The target in ``transformers``, with the dtype and the device of a pipeline, and weights as its stages round them."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._device = chosen_device(spec.settings.cut.device)
        self._model = load_transformers(spec.target, DTYPES[spec.dtype], self._device, attn_implementation="sdpa")
        if spec.settings.numbers.quantize is not None:
            _round(self._model, spec.settings.numbers.quantize)
        self._eos_token_ids = self._model.generation_config.eos_token_id
        self._sequences = Sequences(spec.target)

    @torch.inference_mode()
    def generate(self, prompt_token_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
        """The target's greedy answer; the checkpoint's recommended sampling is ignored."""
        prompt = torch.tensor([list(prompt_token_ids)], device=self._device)
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # some chat models set another in their generation config
            eos_token_id=None if ignore_eos else self._eos_token_ids,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, prompt.shape[1] :]]

    def generate_threads(self, prompt_token_ids: Sequence[int], dialect: str, sampling: SamplingParams) -> list[int]:
        """The target's answer in decode threads, in document order, with a separate forward pass for every token."""
        sequence = self._sequences.maker(len(prompt_token_ids), sampling, dialect)()
        naive_threads(self._model, sequence, prompt_token_ids, sampling)
        return [token.token_id for token in sequence.document()]

    @torch.inference_mode()
    def compare(self, prompt_token_ids: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> Divergence | None:
        """The first difference between two answers in one thread, with the target's margin there; None if they are equal."""
        divergence = first_difference(expected, found)
        if divergence is None or divergence.expected is None or divergence.found is None:
            return divergence
        context = torch.tensor([[*prompt_token_ids, *expected[: divergence.position]]], device=self._device)
        logits_V = self._model(context).logits[0, -1].float()
        margin = (logits_V[divergence.expected] - logits_V[divergence.found]).abs()
        return replace(divergence, margin=float(margin))


@torch.no_grad()
def _round(model: torch.nn.Module, quantize: str) -> None:
    """The matrices of the layers to ``quantize``, embedding and head to 8 bits; a tied head is one tensor with the embedding."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.copy_(rounded(weight, quantize if ".layers." in name else "int8"))
