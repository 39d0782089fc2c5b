"""From the fields of a body to requests to the engine. ``SamplingParams`` and the options of methods check their own ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.sampling import SamplingParams, check_sets_of_tokens
from pipedec.core.values import shortened
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.methods import find_method, make_options
from pipedec.server.errors import bad_request
from pipedec.server.front import ServedRun
from pipedec.server.prompts import check_tokens
from pipedec.server.protocol import MAX_STOP_CHARACTERS, MAX_STOPS, CompletionBody, GenerationBody
from pipedec.server.structures import Structure, require_possible
from pipedec.threads import DIALECTS, Dialect, load_dialect

_SEEDS = 2**64
_SURROGATE = re.compile("[\ud800-\udfff]")
_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


@dataclass(frozen=True)
class GenerationParams:
    """The parameters of a body, besides its prompts."""

    request: PromptRequest  # the first choice's, except prompt, tenant and ``max_tokens``
    context: int  # the model's, in tokens
    vocab_size: int  # the model's
    max_tokens: int | None  # None if it is not given; 0 for the prompt alone
    default_max_tokens: int | None  # if it is not given; None for all that fits
    n: int  # choices per prompt

    def requests(self, prompt: Sequence[int], tenant: str | None = None) -> list[PromptRequest]:
        """One request of ``tenant`` for each choice, whose seed is one more than that of the choice before it.

        Raises ApiError if prompt and answer do not fit into the context, or the text has a token that only the tokenizer has.
        """
        check_tokens(prompt, self.vocab_size, "prompt")
        room = self.context - len(prompt)
        max_tokens = max(1, min(room, self.default_max_tokens or room) if self.max_tokens is None else self.max_tokens)
        if room <= 0:  # in words that agents look for, to shorten their conversation
            longest = f"{self.context - 1}, as the model's context is {self.context}"
            raise bad_request(f"the prompt is too long: {len(prompt)} tokens > {longest}", "prompt")
        if max_tokens > room:
            raise bad_request(
                f"the prompt has {len(prompt)} tokens and max_tokens asks for {max_tokens} more, but the model's context is "
                f"{self.context}: shorten the prompt or lower max_tokens",
                "max_tokens",
            )
        sampling = self.request.sampling
        if sampling.min_tokens > max_tokens:
            raise bad_request(f"min_tokens must be at most {max_tokens}, as many as fit, not {sampling.min_tokens}", "min_tokens")
        seeds = [None if sampling.seed is None else (sampling.seed + index) % _SEEDS for index in range(self.n)]
        choices = [replace(sampling, max_tokens=max_tokens, seed=seed) for seed in seeds]
        return [replace(self.request, prompt=tuple(prompt), tenant=tenant, sampling=choice) for choice in choices]


async def asked_of(
    body: GenerationBody, served: ServedRun, logprobs: int | None, default_max_tokens: int | None,
    prompt_logprobs: int | None = None, structure: Structure | None = None, shown: tuple[int, ...] = (),
) -> GenerationParams:  # fmt: skip
    """Read the parameters of a body. Raises ApiError, with the field, for values that are out of range or not supported.

    ``shown``: special tokens whose names are text of the answer.
    """
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed with stream: true", "stream_options")
    may_be_empty = isinstance(body, CompletionBody) and bool(body.echo)
    if body.max_tokens_asked is not None and body.max_tokens_asked < (0 if may_be_empty else 1):
        raise bad_request(f"max_tokens must be at least 1, or 0 with echo, not {body.max_tokens_asked}", "max_tokens")
    dialect = _dialect(body.threads, served)
    if structure is not None:
        await require_possible(structure, body, served.structures)
    request = PromptRequest(
        (), raw=True, sampling=_sampling(body, served, logprobs, prompt_logprobs, structure, shown),
        method=_method(body, served.description), options=body.method_options or {},
        threads=None if dialect is None else dialect.to_json(), show_threads=dialect is not None and bool(body.stream),
        priority=body.priority or 0,
    )  # fmt: skip
    return GenerationParams(
        request, served.max_model_len, served.vocab_size, body.max_tokens_asked, default_max_tokens, body.n or 1
    )  # fmt: skip


def _sampling(
    body: GenerationBody, served: ServedRun, logprobs: int | None, prompt_logprobs: int | None, structure: Structure | None,
    shown: tuple[int, ...],
) -> SamplingParams:  # fmt: skip
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOPS:
        raise bad_request(f"stop must have at most {MAX_STOPS} strings, not {len(stop)}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARACTERS or _SURROGATE.search(text) for text in stop):
        raise bad_request(f"stop must be strings of 1 to {MAX_STOP_CHARACTERS} whole characters", "stop")
    given = {name: value for name in _AS_THEY_ARE if (value := getattr(body, name)) is not None}
    if body.repeat_penalty is not None:
        given.setdefault("repetition_penalty", body.repeat_penalty)
    seed = body.seed
    if seed is not None and -_SEEDS // 2 <= seed < -1:
        seed += _SEEDS  # as in two's complement
    try:
        check_sets_of_tokens(served.vocab_size, logit_bias=body.logit_bias, stop_token_ids=body.stop_token_ids)
        sampling = SamplingParams(
            max_tokens=served.max_model_len, seed=seed, stop=stop,
            stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())), logprobs=logprobs, prompt_logprobs=prompt_logprobs,
            shown_special_tokens=shown,
            structured_outputs=None if structure is None else structure.outputs,
            **(served.defaults.values | given),
        )  # fmt: skip
    except UserError as error:
        name = re.split(r"\W", str(error))[0]  # messages about a value begin with its field
        raise bad_request(str(error), name if name in type(body).model_fields else None) from None
    return sampling


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


def _dialect(name: str | None, served: ServedRun) -> Dialect | None:
    """A shipped dialect; never a file, as clients have none on this machine. Raises ApiError for any other."""
    if name is None:
        return None
    if name not in DIALECTS:
        raise bad_request(f"threads must be one of {', '.join(DIALECTS)}, not {shortened(name)!r}", "threads")
    dialect = load_dialect(name)
    ids = {token: served.tokenizer.token_id(token) for token in dialect.control_tokens}
    lacking = [token for token, number in ids.items() if number is None or number >= served.vocab_size]
    if lacking:
        raise bad_request(f"the model does not know the dialect {name}: its vocabulary has no token {lacking[0]!r}", "threads")
    return dialect
