"""What travels between a client and rank 0 through Redis: prompts on the way in, events on the way out. JSON only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from pipedec.core import Completion, Metrics, SamplingParams, TreeParams, UserError, Verdict

MAX_TREE = 4096
MAX_DEPTH = 64


@dataclass(frozen=True)
class PromptRequest:
    """A client's request before tokenization. ``raw`` skips the chat template; ``method`` None takes the best there is."""

    prompt: str
    raw: bool = False
    method: str | None = None
    sampling: SamplingParams = SamplingParams()
    tree: TreeParams = TreeParams()
    trace: bool = False

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
            sampling = sampling_from_payload(raw.pop("sampling", {}))
            tree = TreeParams(**raw.pop("tree", {}))
            request = cls(**raw, sampling=sampling, tree=tree)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise UserError(f"the request cannot be read: {error}") from error
        _check_values(request)
        return request


def sampling_from_payload(payload: dict) -> SamplingParams:
    return SamplingParams(**{**payload, "stop_token_ids": tuple(payload.get("stop_token_ids", ()))})


def verdict_to_payload(verdict: Verdict) -> dict[str, object]:
    return {"tokens": list(verdict.tokens), "finished": verdict.finished}


def verdict_from_payload(payload: dict) -> Verdict:
    return Verdict(tuple(payload["tokens"]), payload.get("finished"))


def completion_to_event(completion: Completion) -> dict[str, object]:
    return {"completion": asdict(completion)}


def completion_from_event(event: dict) -> Completion:
    raw = dict(event["completion"])
    return Completion(**{**raw, "metrics": Metrics(**raw["metrics"])})


def _check_values(prompt: PromptRequest) -> None:
    """Refuse what JSON can say and no rank can work with, before any rank has seen it."""
    sampling, tree = prompt.sampling, prompt.tree
    numbers = {"max_tokens": sampling.max_tokens, **{f"tree {name}": value for name, value in asdict(tree).items()}}
    for name, value in numbers.items():
        if type(value) is not int and not (name == "tree rows" and value is None):
            raise UserError(f"{name} must be a whole number, not {str(value)[:100]!r}")
    _check_size(prompt)
    switches = {"raw": prompt.raw, "trace": prompt.trace, "ignore_eos": sampling.ignore_eos}
    for name, switch in switches.items():
        if type(switch) is not bool:
            raise UserError(f"{name} must be true or false, not {str(switch)[:100]!r}")
    if any(type(token) is not int for token in sampling.stop_token_ids):
        raise UserError("stop_token_ids must be whole numbers")
    try:
        prompt.prompt.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8 text") from None


def _check_size(prompt: PromptRequest) -> None:
    tree = prompt.tree
    if max(tree.width, tree.children, tree.rows or 0) > MAX_TREE:
        raise UserError(f"tree width, tree children and tree rows must be at most {MAX_TREE}")
    if tree.depth > MAX_DEPTH:
        raise UserError(f"tree depth must be at most {MAX_DEPTH}")
    layer = tree.rows or tree.width
    if prompt.method == "stpp" and tree.depth * layer > MAX_TREE:
        raise UserError(f"{tree.depth} layers of {layer} rows are drafted at once: together they must be at most {MAX_TREE}")
