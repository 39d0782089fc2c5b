"""pipedec: pipeline-parallel speculative decoding of one request over many GPUs."""

from typing import TYPE_CHECKING, Any

from pipedec.core.completion import Completion
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.methods import BestFirstOptions, BitaOptions, PipeDecOptions, StaticTreeOptions

if TYPE_CHECKING:
    from pipedec.llm import LLM, AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BestFirstOptions",
    "BitaOptions",
    "Completion",
    "PipeDecOptions",
    "SamplingParams",
    "StaticTreeOptions",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    """``LLM`` and ``AsyncLLM`` are loaded when they are first used, because they need torch and a client does not."""
    if name not in ("LLM", "AsyncLLM"):
        raise AttributeError(f"module 'pipedec' has no attribute {name!r}")
    from pipedec import llm

    return getattr(llm, name)
