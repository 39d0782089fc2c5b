"""Default sampling parameters of requests: those that a checkpoint recommends in its ``generation_config.json``, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import value_of
from pipedec.directories import shipped_part
from pipedec.families import json_object
from pipedec.gguf import model_files

AUTO, NEUTRAL = "auto", "vllm"  # values of --generation-config that are no directory
_FILE = "generation_config.json"
_NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_HINT = f"correct it, or give --generation-config {NEUTRAL}"
_MAX_TOKENS = "max_new_tokens"  # transformers' name


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of the parameters of ``SamplingParams`` that a request does not set."""

    values: dict[str, Any] = field(default_factory=lambda: dict(_NEUTRAL))
    max_tokens: int | None = None  # of a chat's answer; None for all that fit into the context
    source: str = NEUTRAL  # the file that they come from; ``vllm`` for vLLM's and OpenAI's own defaults


def sampling_defaults(choice: str, target: str) -> SamplingDefaults:
    """The defaults that ``--generation-config`` asks for: the keys that vLLM takes, and ``do_sample: false`` as temperature 0.

    Args:
        choice: ``auto`` for the target's (those that are shipped for it, if it is a named one), ``vllm`` for neutral ones, or a
            directory with a ``generation_config.json``.
        target: directory of the target, or a GGUF file; if it is on other machines only, the defaults are neutral.

    Raises UserError if there is no such directory or file, or a value in it is not allowed.
    """
    if choice == NEUTRAL:
        return SamplingDefaults()
    shipped = None
    with suppress(UserError):  # the shipped models are not installed
        shipped = shipped_part(target, _FILE) if choice == AUTO else None
    path = shipped or (model_files(target) if choice == AUTO else Path(choice)) / _FILE
    if not path.is_file():
        if choice == AUTO:
            return SamplingDefaults()
        missing = f"there is no {_FILE} in it" if path.parent.is_dir() else "there is no such directory"
        raise UserError(f"--generation-config {choice}: {missing}: give a directory that has one, {AUTO} or {NEUTRAL}")
    document = json_object(path)
    # vLLM ignores this, but a file has no other way to recommend greedy answers: transformers complains about temperature 0.
    if document.get("do_sample") is False and document.get("temperature") is None:
        document["temperature"] = 0.0
    given = {name: document[name] for name in (*_NEUTRAL, _MAX_TOKENS) if document.get(name) is not None}
    max_tokens = given.pop(_MAX_TOKENS, None)
    try:
        SamplingParams(**given)
        value_of(Annotated[int, Meta(ge=1)] | None, max_tokens, _MAX_TOKENS)
    except UserError as error:
        raise UserError(f"{path}: {error}: {_HINT}") from None
    return SamplingDefaults({**_NEUTRAL, **given}, max_tokens, str(path) if given or max_tokens else NEUTRAL)
