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


def text_names(model: Any, tensors: Collection[str], known: Collection[str]) -> dict[str, str]:
    """The names in a checkpoint of tensors of the text model, by their names in the whole model.

    Checkpoints have names in several fashions: transformers renames them as it loads.

    Args:
        tensors: of the text model.
        known: the names in the checkpoint. A matrix may be several tensors there, beside which its weight would be.
    """
    weights = {f"{name.rpartition('.')[0]}.weight" for name in known}
    found = {loaded: name for name, loaded in _loaded_names(model, weights | {*known}).items()}
    return {name: found[name] for name in tensors if name in found}


def towers(model: Any, names: Mapping[str, str], known: Collection[str]) -> tuple[str, ...]:
    """Where tensors of a checkpoint begin that the text model does without: its outermost parts.

    Args:
        names: of the tensors of the text model in the checkpoint, by their names in the whole model.
        known: the names in the checkpoint.
    """
    shared, stored = _leading_parts(names), _leading_parts(names.values())
    own = {_outermost(name, shared) for name in model.state_dict() if name not in names}
    loaded = _loaded_names(model, known)
    found = {_outermost(name, stored) for name in known if _outermost(loaded[name], shared) in own}
    return tuple(sorted({*(found or own), HEADS_AHEAD}))


def _loaded_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """The names in the model, as transformers loads them, by those in a checkpoint."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules, own = get_model_conversion_mapping(model), model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    found = {}
    for name in sorted(stored):
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        found[name] = name if renamed not in own and name in own else renamed
    return found


def _leading_parts(names: Iterable[str]) -> set[str]:
    return {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}


def _outermost(name: str, shared: Collection[str]) -> str:
    """The shortest leading part of a name that is not shared, else the whole name."""
    return next((part for part in accumulate(name.split("."), "{}.{}".format) if part not in shared), name)
