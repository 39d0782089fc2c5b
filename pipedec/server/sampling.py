"""From the fields of a body to what the engine is asked for. Ranges are checked by the nouns themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from pipedec.core import DEFAULT_METHOD, SamplingParams, UserError
from pipedec.messages import PromptRequest, RunDescription
from pipedec.methods import find_method, make_options
from pipedec.server.errors import ApiError, bad_request
from pipedec.server.front import ServedRun
from pipedec.server.prompts import check_token_ids
from pipedec.server.protocol import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOPS, GenerationBody
from pipedec.server.structures import Structure, require_possible
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import DIALECTS, Dialect, load_dialect
from pipedec.validation import shortened

_SEEDS = 2**64
_SURROGATE = re.compile("[\ud800-\udfff]")
_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True)
class GenerationParams:
    """The parameters of a body, besides its prompts.

    Attributes:
        sampling: of the first choice; ``max_tokens`` counts only if ``max_tokens`` is given.
        max_tokens: None if the body does not say; 0 for the prompt alone.
        n: choices per prompt.
    """

    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    method: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dialect: Dialect | None = None
    shows_threads: bool = False
    priority: int = 0

    def requests(self, prompt: Sequence[int], served: ServedRun, default_max_tokens: int | None = None) -> list[PromptRequest]:
        """One request for each choice.

        Args:
            default_max_tokens: if the body does not say; None for all that fits.

        Raises:
            ApiError: prompt and answer do not fit into the context.
        """
        max_tokens = self._max_tokens(len(prompt), served.max_model_len, default_max_tokens)
        threads = None if self.dialect is None else self.dialect.to_json()
        return [
            PromptRequest(
                tuple(prompt), raw=True, method=self.method, sampling=self._of_choice(index, max_tokens), options=self.options,
                threads=threads, show_threads=self.shows_threads, priority=self.priority,
            )
            for index in range(self.n)
        ]  # fmt: skip

    def _max_tokens(self, prompt_tokens: int, context: int, default: int | None) -> int:
        room = context - prompt_tokens
        wanted = default if self.max_tokens is None else self.max_tokens
        asked = max(1, min(room, wanted or room) if self.max_tokens is None else self.max_tokens)
        if asked > room:
            raise bad_request(
                f"the prompt has {prompt_tokens} tokens and max_tokens asks for {asked} more, but the model's context is "
                f"{context}: shorten the prompt or lower max_tokens",
                "prompt" if prompt_tokens >= context else "max_tokens",
            )
        return asked

    def _of_choice(self, index: int, max_tokens: int) -> SamplingParams:
        """Choice ``index``: its seed is one more than that of the choice before it."""
        seed = self.sampling.seed
        return replace(self.sampling, max_tokens=max_tokens, seed=None if seed is None else (seed + index) % _SEEDS)


async def asked_of(
    body: GenerationBody, served: ServedRun, logprobs: int | None, echoes: bool = False, structure: Structure | None = None
) -> GenerationParams:
    """Read the parameters of a body. Raises ApiError, with the field, for values that are out of range or not supported.

    Args:
        logprobs: as in ``SamplingParams``.
        echoes: the prompt is returned, too, with its log-probabilities if there are any.
        structure: of every answer; None for free text.
    """
    body.refuse_unsupported()
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is not None and max_tokens < (0 if echoes else 1):
        raise bad_request(f"max_tokens must be at least 1, or 0 with echo, not {max_tokens}", "max_tokens")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise bad_request(f"n must be between 1 and {MAX_CHOICES}, not {n}", "n")
    dialect = _dialect(body.threads, served.tokenizer)
    if structure is not None:
        await require_possible(structure, body)
    sampling = _sampling(body, served, logprobs, echoes, structure)
    return GenerationParams(
        sampling, max_tokens, n, _method(body, served.description),
        body.method_options or {}, dialect, dialect is not None and bool(body.stream), body.priority or 0,
    )  # fmt: skip


def _sampling(
    body: GenerationBody, served: ServedRun, logprobs: int | None, echoes: bool, structure: Structure | None
) -> SamplingParams:
    given = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    try:
        sampling = SamplingParams(
            seed=_seed(body.seed), stop=_stop(body), logprobs=logprobs, prompt_logprobs=logprobs if echoes else None,
            structured_outputs=None if structure is None else structure.outputs,
            **(served.defaults.values | given),
        )  # fmt: skip
    except UserError as error:
        raise field_error(error, body) from None
    check_token_ids(sampling.logit_bias or (), served.tokenizer, "logit_bias")
    check_token_ids(sampling.stop_token_ids, served.tokenizer, "stop_token_ids")
    if body.min_tokens and (not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids):
        raise bad_request("min_tokens is not supported: use ignore_eos without stop, or leave it out", "min_tokens")
    return sampling


def _seed(seed: int | None) -> int | None:
    """Negative ones count from the end, as in two's complement."""
    return seed if seed is None or not -_SEEDS // 2 <= seed < 0 else seed % _SEEDS


def _stop(body: GenerationBody) -> tuple[str, ...]:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOPS:
        raise bad_request(f"stop must have at most {MAX_STOPS} strings, not {len(stop)}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARACTERS or _SURROGATE.search(text) for text in stop):
        raise bad_request(f"stop must be strings of 1 to {MAX_STOP_CHARACTERS} whole characters", "stop")
    return stop


def _method(body: GenerationBody, description: RunDescription) -> str | None:
    """Raises ApiError for an unknown one, one that this run cannot do, or options that it does not take."""
    if body.method is None and not body.method_options:
        return None
    method = body.method or DEFAULT_METHOD
    try:
        missing = find_method(method).missing(description.draft is not None, description.bita is not None)
        if missing is not None:
            raise bad_request(f"this server cannot do the method {method}: {missing.split(':')[0]}", "method")
        make_options(method, body.method_options)
    except UserError as error:
        raise bad_request(str(error), "method") from None
    return method


def _dialect(name: str | None, tokenizer: Tokenizer) -> Dialect | None:
    """A shipped one; never a file, because a client has none here."""
    if name is None:
        return None
    if name not in DIALECTS:
        raise bad_request(f"threads must be one of {', '.join(DIALECTS)}, not {shortened(name)!r}", "threads")
    dialect = load_dialect(name)
    lacking = [token for token in dialect.control_tokens if tokenizer.token_id(token) is None]
    if lacking:
        raise bad_request(f"the model does not know the dialect {name}: its vocabulary has no token {lacking[0]!r}", "threads")
    return dialect


def field_error(error: UserError, body: GenerationBody) -> ApiError:
    """Messages about a value begin with its field."""
    name = str(error).split(" ", 1)[0]
    return bad_request(str(error), name if name in type(body).model_fields else None)
