"""The text model of a multimodal one, by transformers' own rules: its config, and the names of its tensors in a checkpoint.

Towers for images and sound, and what joins them to the text model, are left out. torch is loaded when such a model is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import Any

HEADS_AHEAD = "mtp"  # heads that predict further tokens, of which the modules of transformers have none


def text_config(stated: Any) -> Any:
    """The config of the text model: a nested one, or that of the whole model."""
    return getattr(stated, "text_config", None) or stated


def auto_class(stated: Any) -> Any:
    """The class of transformers that makes a model with a head from a config."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForCausalLM if text_config(stated) is stated else AutoModelForMultimodalLM


def loaded_names(model: Any, known: Iterable[str]) -> dict[str, str]:
    """The names that transformers gives to tensors of a checkpoint as it loads them, by those in the checkpoint.

    Checkpoints have names in several fashions. A matrix may be stored as several tensors: the weight that they stand for has a
    name here too.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules, own = get_model_conversion_mapping(model), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    stored, found = {*known}, {}
    for name in sorted(stored | {f"{name.rpartition('.')[0]}.weight" for name in stored}):
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        found[name] = name if renamed not in own and name in own else renamed
    return found


def towers(model: Any, text: Mapping[str, str], loaded: Mapping[str, str]) -> tuple[str, ...]:
    """Where tensors of a checkpoint begin that the text model does without: its outermost parts.

    Args:
        text: the names of the text model's tensors in the checkpoint, by those in the whole model.
        loaded: see ``loaded_names``.
    """
    shared, stored = _leading_parts(text), _leading_parts(text.values())
    own = {_outermost(name, shared) for name in model.state_dict() if name not in text}
    found = {_outermost(name, stored) for name, known in loaded.items() if _outermost(known, shared) in own}
    return tuple(sorted({*(found or own), HEADS_AHEAD}))


def _leading_parts(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}


def _outermost(name: str, shared: Collection[str]) -> str:
    """The shortest leading part of a name that is not shared, else the whole name."""
    return next((part for part in accumulate(name.split("."), "{}.{}".format) if part not in shared), name)
