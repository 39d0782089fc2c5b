"""Compares a pipeline's answer with the one that the target generates in ``transformers``, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pipedec.core import SamplingParams
from pipedec.engine.sequences import Sequences
from pipedec.engine.spec import PipelineSpec
from pipedec.verify.threads import naive_threads


@dataclass(frozen=True)
class Divergence:
    """The first difference between two answers.

    Attributes:
        position: index of the first output token that differs or exists in only one answer.
        expected, found: the two token ids; None if the answer had ended.
        margin: difference of the target's two highest logits there. In float32 a margin above 1e-3 means a defect; in half
            precision a small margin is a near tie, which a different number of rows may flip. None for answers in threads.
    """

    position: int
    expected: int | None
    found: int | None
    margin: float | None = None

    def __str__(self) -> str:
        margin = f"; the target's two best logits are {self.margin:.2g} apart there" if self.margin is not None else ""
        return f"output token {self.position} is {self.found}, not {self.expected}{margin}"


class Reference:
    """The target in ``transformers``, with the dtype and the device of a pipeline."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._device = spec.torch_device()
        model = AutoModelForCausalLM.from_pretrained(Path(spec.target), dtype=spec.torch_dtype, attn_implementation="sdpa")
        self._model = model.to(self._device).eval()
        self._eos_token_ids = model.generation_config.eos_token_id
        self._sequences = Sequences(spec.target)

    @torch.inference_mode()
    def generate(self, prompt_token_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
        """The target's greedy answer, whatever sampling the checkpoint recommends."""
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

    def compare_threads(
        self, prompt_token_ids: Sequence[int], expected: Sequence[int], found: Sequence[int]
    ) -> Divergence | None:
        """As ``compare``, for answers in decode threads, given in document order. The margin is not computed."""
        for position, (wanted, token) in enumerate(zip_longest(expected, found)):
            if wanted != token:
                return Divergence(position, wanted, token)
        return None

    @torch.inference_mode()
    def compare(self, prompt_token_ids: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> Divergence | None:
        """The first difference between two answers to a prompt, or None if they are equal."""
        if list(expected) == list(found):
            return None
        pairs = enumerate(zip(expected, found, strict=False))
        position = next((index for index, (one, other) in pairs if one != other), min(len(expected), len(found)))
        context = torch.tensor([[*prompt_token_ids, *expected[:position]]], device=self._device)
        best = self._model(context).logits[0, -1].float().topk(2).values
        return Divergence(
            position,
            expected[position] if position < len(expected) else None,
            found[position] if position < len(found) else None,
            float(best[0] - best[1]),
        )
