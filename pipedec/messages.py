"""What travels between a client and rank 0 through Redis: prompts on the way in, events on the way out. JSON only."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipedec.core import Completion, Metrics, SamplingParams, TreeParams, UserError

MAX_TREE = 4096
MAX_DEPTH = 64
_NUMBERS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
_WHOLE_NUMBERS = {"max_tokens", "top_k", "seed", "logprobs"}
_OPTIONAL = {"seed", "logprobs"}
_TOKEN_ID = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class PromptRequest:
    """A client's request before tokenization. ``raw`` skips the chat template; ``method`` None takes the best there is.

    ``threads`` is a dialect as JSON text (``Dialect.to_json``), None for an answer in one thread.
    """

    prompt: str
    raw: bool = False
    method: str | None = None
    sampling: SamplingParams = SamplingParams()
    tree: TreeParams = TreeParams()
    trace: bool = False
    threads: str | None = None
    show_threads: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PromptRequest:
        """Raises UserError for anything that is not such a request."""
        try:
            raw = json.loads(text)
            unknown = set(raw) - {field.name for field in fields(cls)}
            if unknown or not isinstance(raw["prompt"], str):
                known = ", ".join(field.name for field in fields(cls))
                raise UserError(f"a request is an object with the text field prompt; its fields are {known}")
            sampling = _sampling(raw.pop("sampling", {}))
            tree = _tree(raw.pop("tree", {}))
            request = cls(**raw, sampling=sampling, tree=tree)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise UserError(f"the request cannot be read: {error}") from error
        _check_values(request)
        return request


def sampling_from_payload(payload: dict) -> SamplingParams:
    bias = payload.get("logit_bias")
    return SamplingParams(**{**payload, "logit_bias": bias and {int(token): value for token, value in bias.items()}})


def completion_to_event(completion: Completion) -> dict[str, object]:
    return {"completion": asdict(completion)}


def completion_from_event(event: dict) -> Completion:
    raw = dict(event["completion"])
    return Completion(**{**raw, "metrics": Metrics(**raw["metrics"])})


def _check_values(prompt: PromptRequest) -> None:
    """Refuse what JSON can say and no rank can work with, before any rank has seen it."""
    for name, value in asdict(prompt.tree).items():
        if name not in ("proposers", "shape") and type(value) is not int and value is not None:
            raise UserError(f"tree {name} must be a whole number, not {str(value)[:100]!r}")
    _check_size(prompt)
    if prompt.threads is not None and type(prompt.threads) is not str:
        raise UserError(f"threads must be the text of a dialect, not {str(prompt.threads)[:100]!r}")
    switches = {"raw": prompt.raw, "trace": prompt.trace, "ignore_eos": prompt.sampling.ignore_eos}
    switches["show_threads"] = prompt.show_threads
    for name, switch in switches.items():
        if type(switch) is not bool:
            raise UserError(f"{name} must be true or false, not {str(switch)[:100]!r}")
    for name, text in (("the prompt", prompt.prompt), *(("stop", stop) for stop in prompt.sampling.stop)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{name} is not UTF-8 text") from None


def _sampling(payload: Any) -> SamplingParams:
    """A client's sampling parameters: what is no number is refused here, what is out of range by ``SamplingParams``."""
    if not isinstance(payload, dict):
        raise TypeError("sampling is no object")
    for name in _NUMBERS & set(payload):
        if type(payload[name]) not in (int, float):
            raise UserError(f"{name} must be a number, not {str(payload[name])[:100]!r}")
    for name in _WHOLE_NUMBERS & set(payload):
        if type(payload[name]) is not int and not (payload[name] is None and name in _OPTIONAL):
            raise UserError(f"{name} must be a whole number, not {str(payload[name])[:100]!r}")
    if not _is_list_of(int, payload.get("stop_token_ids", [])):
        raise UserError("stop_token_ids must be whole numbers")
    if not isinstance(payload.get("stop", ""), str) and not _is_list_of(str, payload["stop"]):
        raise UserError("stop must be texts")
    bias = payload.get("logit_bias") or {}
    is_bias = isinstance(bias, dict) and all(_TOKEN_ID.fullmatch(token) for token in bias)
    if not is_bias or not all(type(value) in (int, float) for value in bias.values()):
        raise UserError('logit_bias must give numbers to token ids, like {"42": -5}')
    return sampling_from_payload(payload)


def _tree(payload: Any) -> TreeParams:
    if not isinstance(payload, dict):
        raise TypeError("tree is no object")
    if not _is_list_of(str, payload.get("proposers", [])):
        raise UserError("tree proposers must be texts")
    if not isinstance(payload.get("shape", ""), str):
        raise UserError("tree shape must be a text")
    return TreeParams(**payload)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _check_size(prompt: PromptRequest) -> None:
    tree = prompt.tree
    if max(tree.width or 0, tree.children or 0, tree.rows or 0, tree.forwards or 0) > MAX_TREE:
        raise UserError(f"tree width, children, rows and forwards must be at most {MAX_TREE}")
    depth = tree.depth or 0
    if depth > MAX_DEPTH:
        raise UserError(f"tree depth must be at most {MAX_DEPTH}")
    limits = tree.with_defaults()
    layer = limits.rows or limits.width
    if prompt.method == "stpp" and limits.depth * layer > MAX_TREE:
        raise UserError(f"{limits.depth} layers of {layer} rows are drafted at once: together they must be at most {MAX_TREE}")
