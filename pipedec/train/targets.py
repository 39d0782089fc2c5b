"""A frozen target as a training asks it: a model of transformers in this process, or the target of a running cluster.

Owns how answers and hidden states are obtained, and which tensors are read for what a training computes itself: embeddings of
input and output. Knows no recipe. Shapes: B rows, T tokens of a row, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import linear

from pipedec.checkpoints import CheckpointPart, LayerSpan, combined, fingerprint, part_digests
from pipedec.client.client import Client
from pipedec.client.reply import Reply
from pipedec.client.run_handle import RunHandle
from pipedec.core.errors import RankLost, SchedulerLost, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import DTYPES
from pipedec.families import Shape, model_config
from pipedec.formats import PLAIN
from pipedec.messages.request import PromptRequest
from pipedec.model import Checkpoint, Target, WidenedMatrix
from pipedec.train.run import Run
from pipedec.verify.reference import load_transformers

Model = Any  # a causal language model of transformers, whose classes share no usable type
ANSWERS_IN_FLIGHT, ROWS_IN_FLIGHT = 16, 4  # requests to a cluster, for answers and for hidden states


class FrozenTarget(Protocol):
    """A target that is only asked. In a cluster it raises UserError and RankLost as ``Client``."""

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """The tokens that follow each prompt, up to and with an end token. Prompts draw different tokens, also equal ones."""

    def hidden_states(self, ids_BT: Tensor) -> Tensor:
        """After the final norm, [B, T, E], in the dtype in which the target computes."""


class LoadedTarget:
    """A model of transformers, which ``load`` makes when needed: in ``dtype`` for answers, in bfloat16 for hidden states."""

    def __init__(self, load: Callable[[torch.dtype], Model], dtype: torch.dtype = torch.float32) -> None:
        self._load, self._dtype = cache(load), dtype

    @classmethod
    def of(cls, path: Path, run: Run) -> LoadedTarget:
        """The target of a checkpoint, which computes as ``run`` says."""
        torch.set_num_threads(run.threads)
        return cls(lambda dtype: load_transformers(path, dtype, run.device), run.torch_dtype)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """One batch through transformers' ``generate``, padded on the left."""
        target = self._load(self._dtype)
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        named = target.generation_config.eos_token_id  # one, several or none
        ends = frozenset(named if isinstance(named, list) else [named])
        pad = target.config.get_text_config().pad_token_id or 0
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=target.device)
        mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
        how = {"max_new_tokens": sampling.max_tokens, "repetition_penalty": 1.0, "use_cache": True, "pad_token_id": pad}
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": sampling.top_p}
        how |= drawn if sampling.is_stochastic else {"do_sample": False}
        rows = target.generate(ids_BT, attention_mask=mask_BT, **how)[:, longest:].tolist()
        return [row[: next((place for place, token in enumerate(row, start=1) if token in ends), len(row))] for row in rows]

    @torch.no_grad()
    def hidden_states(self, ids_BT: Tensor) -> Tensor:
        target = self._load(torch.bfloat16)
        hidden_BTE: Tensor = target.get_decoder()(input_ids=ids_BT.to(target.device), use_cache=False).last_hidden_state
        return hidden_BTE


class RunningTarget:
    """The target of a running cluster, which answers several requests at once.

    Until all hidden states of a row have arrived, Redis keeps them, as base64: of ``ROWS_IN_FLIGHT`` rows at most, 180 MB for
    rows of 2,048 tokens and a hidden size of 8,192 in bfloat16.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    @classmethod
    def of(cls, running: RunHandle, path: Path) -> RunningTarget:
        """Raises UserError unless the cluster serves the checkpoint at ``path``, by the digests of its weights if its ranks have
        compared them, else by its directory on this machine.
        """
        served, digest = Path(running.description.target), running.description.digests.get("target")
        if digest is None:
            is_same = served.resolve() == path.resolve() or (served.exists() and fingerprint(served) == fingerprint(path))
        else:
            whole = LayerSpan(range(model_config(path).num_hidden_layers), True, True)
            is_same = combined(part_digests([CheckpointPart("target", str(path), (whole,))])["target"]) == digest
        if not is_same:
            raise UserError(f"run {running.run_id} serves {served}, not --target {path}: give the target that it serves")
        return cls(running.client)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        first = None if sampling.seed is None else sampling.seed * len(prompts)
        each = [sampling if first is None else replace(sampling, seed=first + number) for number in range(len(prompts))]
        asked = [PromptRequest(tuple(ids), sampling=one) for ids, one in zip(prompts, each, strict=True)]
        return [reply.completed().token_ids for reply in self._replies(asked, ANSWERS_IN_FLIGHT)]

    def hidden_states(self, ids_BT: Tensor) -> Tensor:
        sampling = SamplingParams(max_tokens=1, prompt_hidden_states=True)
        asked = [PromptRequest(tuple(ids), sampling=sampling) for ids in ids_BT.tolist()]
        found = [reply.hidden_states for reply in self._replies(asked, ROWS_IN_FLIGHT) if reply.completed()]
        rows = [torch.frombuffer(bytearray().join(one.rows), dtype=DTYPES[one.dtype]).view(len(one.rows), -1) for one in found]
        return torch.stack(rows)

    def _replies(self, asked: Sequence[PromptRequest], most: int) -> list[Reply]:
        try:
            return self._client.ask_all(asked, most=most)
        except (RankLost, SchedulerLost) as error:
            raise RankLost(f"{error}; --work has all answers so far: with a running cluster, the same command goes on") from None


def read_tensors(path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """These tensors of a checkpoint and no others, matrices first. What is stored in fewer bits is widened."""
    config, checkpoint, found, targets = model_config(path), Checkpoint(path), list[Tensor](), dict[str, Target]()
    for name, shape in sorted(shapes.items(), key=lambda item: -len(item[1])):
        tensor, format = torch.empty(shape, dtype=dtype, device=device), checkpoint.format_of(config, name, shape)
        targets[name] = tensor if format is PLAIN else WidenedMatrix(tensor, [(format, shape[0])])
        found.append(tensor)
    checkpoint.read_into(targets)
    return found


def output_embeddings(path: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Makes logits [T, V] from hidden states [T, E], in their dtype, with the head of a checkpoint alone."""
    head = model_config(path).head_tensors(Checkpoint(path).names)
    read = cache(lambda dtype: read_tensors(path, head, dtype, device))
    return lambda hidden_TE: linear(hidden_TE.to(device), *read(hidden_TE.dtype))
