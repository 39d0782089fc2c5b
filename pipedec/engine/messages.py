"""What travels between a client and rank 0 through Redis: prompts on the way in, events on the way out. JSON only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from pipedec.core import Completion, Metrics, SamplingParams, TreeParams, UserError, Verdict


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
            return cls(**raw, sampling=sampling, tree=tree)
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise UserError(f"the request cannot be read: {error}") from error


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
