"""llama.cpp in this process, on a GGUF file, by the package ``xllamacpp``.

Its weights stay quantised, and it rounds activations as well, so its answers are not the target's own, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pipedec.core.errors import UserError
from pipedec.gguf import is_gguf, located

NAME = "llama.cpp"


def is_installed() -> bool:
    """Whether its package is there."""
    return find_spec("xllamacpp") is not None


class LlamaCpp:
    """A loaded model for requests of ``context`` tokens. It computes with torch's number of threads, on the CPU.

    Raises UserError if the package is not installed, the model is no GGUF file, or llama.cpp does not load it.
    """

    def __init__(self, model: Path, context: int) -> None:
        if not is_installed():
            raise UserError(f"{NAME} needs the package xllamacpp: pip install xllamacpp")
        if not is_gguf(model):
            raise UserError(f"{NAME} reads GGUF files, and {model} is none")
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(located(model))
        options.n_ctx, options.n_gpu_layers = context, 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
        options.port, options.verbosity = 0, -1
        try:
            self._server = xllamacpp.Server(options)
        except RuntimeError as error:
            raise UserError(f"{NAME} does not load {model}: {' '.join(str(error).split())[:160]}") from None

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer's token ids, up to an end token or ``max_tokens``."""
        choice = self._server.handle_completions(_asked(prompt_token_ids, max_tokens) | {"logprobs": 1})["choices"][0]
        return [entry["id"] for entry in choice["logprobs"]["content"]]


def _asked(prompt_token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompt_token_ids), "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}
