"""transformers' own modules of a model, without weights, and what pipedec replaces in them: cache, recurrence and experts.

No code of a checkpoint is executed, and nothing is downloaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from pipedec.core.errors import UserError
from pipedec.families.multimodal import auto_class, text_config

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")  # functions of modules with a recurrent state
CONVOLUTION = "causal_conv1d_fn"  # that of the short convolution before them


@dataclass(frozen=True)
class ModuleNames:
    """Where a model of transformers keeps its parts, as paths of modules."""

    base: str  # the model without head
    decoder: str  # the text model in it, if there are others, else the same
    embedding: str
    layers: str
    norm: str
    head: str

    def layer(self, number: int) -> str:
        return f"{self.layers}.{number}"


def stated_config(directory: Path) -> Any:
    """The config that transformers makes of ``config.json``. Raises UserError for an unknown model, or if it refuses the file."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with many exception types of its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"neither pipedec nor the installed transformers can read it: {reason}") from None


def skeleton(stated: Any, functions: str | None, dtype: Any = None, experts: str | None = None) -> Any:
    """The model of transformers that a config describes, whose weights are on the meta device: they have shapes, but no memory.

    Buffers that are computed, such as frequencies, are real. ``functions``: the name under which transformers knows the attention
    function of the text model (None: its default), and the function of its experts unless ``experts`` names that.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.initialization import no_init_weights

    class WithoutWeights(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_weight = function in (torch.empty, torch.rand, torch.randn)
            return function(*args, **{**(kwargs or {}), **({"device": "meta"} if is_weight else {})})

    of_attention, of_experts = (
        name if name is None or text_config(stated) is stated else {"text_config": name}
        for name in (functions, experts or functions)
    )
    with WithoutWeights(), no_init_weights():
        model = auto_class(stated).from_config(
            stated, dtype=dtype or torch.float32, attn_implementation=of_attention, experts_implementation=of_experts,
            trust_remote_code=False,
        )  # fmt: skip
    for module in model.modules():  # weights made of zeros or ones, as frequencies may be
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model.eval()


def has_experts(module: Any) -> bool:
    """Whether a module holds stacks of the matrices of experts, and computes with them by a function that can be replaced."""
    return hasattr(module, "has_gate") and hasattr(module, "_apply_gate")


def is_recurrent(module: Any) -> bool:
    """Whether a module computes with a recurrent state, by one of ``RULES``."""
    return not _forward_names(module).isdisjoint(RULES)


def _forward_names(module: Any) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def replace_functions(module: Any, rule: Callable[..., Any], convolution: Callable[..., Any]) -> None:
    """Let a module with a recurrent state compute by these functions instead of those that its file has for all models."""
    forward = inspect.unwrap(type(module).forward)
    replaced = dict.fromkeys(RULES, rule) | {CONVOLUTION: convolution}
    own = FunctionType(
        forward.__code__, {**forward.__globals__, **replaced}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


def module_cache(update: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Any:
    """A cache of transformers for one forward: layers write keys and values by ``update`` and attend to what it returns. Layers
    with a recurrent state find none.
    """
    found = _cache_class()(layers=[])
    found.update_keys_values = update
    return found


@lru_cache(maxsize=1)
def _cache_class() -> type:
    from transformers import Cache

    class ModuleCache(Cache):
        update_keys_values: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return self.update_keys_values(key_states, value_states, layer_idx)

        def get_conv_state(self, *_: Any, **__: Any) -> None:
            return None

        def get_recurrent_state(self, *_: Any, **__: Any) -> None:
            return None

        def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return recurrent_states

    return ModuleCache
