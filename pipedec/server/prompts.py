"""From prompts and messages to token ids. What is too long is refused before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.sampling import check_token_ids
from pipedec.server.errors import bad_request
from pipedec.server.front import ServedRun
from pipedec.server.protocol import ConversationMessage, GenerationBody, GivenCall, Prompts
from pipedec.server.workers import Workers
from pipedec.text.chat_template import text_of
from pipedec.text.parsers import knows_tools
from pipedec.text.tokenizer import Tokenizer

_LONG_CHARACTERS = 4000  # longer texts are tokenized in a thread, so that other requests do not wait
READERS = Workers(2, most=64, seconds=30.0)


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and as the client wrote it."""

    token_ids: Sequence[int]
    text: str
    rendered: str = ""  # by the chat template


def num_kept(body: GenerationBody, served: ServedRun) -> int | None:
    """Tokens at the end of a prompt that are kept; None for all. Raises ApiError."""
    given = body.truncate_prompt_tokens
    if given == 0:
        raise bad_request("truncate_prompt_tokens must be at least 1, or -1 for as many as fit, not 0", "truncate_prompt_tokens")
    return max(1, served.max_model_len - max(1, body.max_tokens_asked or 1)) if given == -1 else given


async def tokenized(
    given: Prompts, served: ServedRun, max_prompts: int, add_special_tokens: bool = True, kept: int | None = None
) -> list[Prompt]:
    """The prompts of ``/v1/completions``: one or several, as text or as token ids. ``kept``: as of ``num_kept``.

    Raises ApiError if a prompt is empty or too long, or a token is not in the vocabulary.
    """
    is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    prompts: Sequence[Any] = given if is_list else [given]
    if len(prompts) > max_prompts:
        raise bad_request(f"prompt must be 1 to {max_prompts} prompts, not {len(prompts)}", "prompt")
    context = served.max_model_len
    for prompt in prompts:
        if not prompt:
            raise bad_request("prompt is empty: give text or token ids", "prompt")
        if isinstance(prompt, str):
            _check_length(prompt, served, "prompt", kept)
        elif len(prompt) >= context and kept is None:
            raise bad_request(f"the prompt has {len(prompt)} tokens, but the model's context is {context}", "prompt")
        else:
            check_tokens(prompt, served.vocab_size, "prompt")
    if sum(map(len, prompts)) > _LONG_CHARACTERS:
        return await READERS.run(partial(_prompts, prompts, served.tokenizer, add_special_tokens, kept))
    return _prompts(prompts, served.tokenizer, add_special_tokens, kept)


def check_tokens(token_ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises ApiError if one is not in the vocabulary."""
    try:
        check_token_ids(field, token_ids, vocab_size)
    except UserError as error:
        raise bad_request(str(error), field) from None


def _check_length(text: str, served: ServedRun, param: str, kept: int | None) -> None:
    if kept is not None:
        return
    try:
        served.tokenizer.check_length(text, served.max_model_len)
    except UserError as error:
        raise bad_request(str(error), param) from None


def _prompts(
    prompts: Sequence[str | Sequence[int]], tokenizer: Tokenizer, add_special_tokens: bool, kept: int | None
) -> list[Prompt]:
    found = []
    for prompt in prompts:
        try:
            token_ids = tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
        except UserError as error:
            raise bad_request(str(error), "prompt") from None
        if not token_ids:
            raise bad_request("prompt has no tokens: give more text", "prompt")
        last = _last(token_ids, kept)
        is_whole = isinstance(prompt, str) and len(last) == len(token_ids)
        found.append(Prompt(last, str(prompt) if is_whole else tokenizer.decode(last)))
    return found


def _last(token_ids: Sequence[int], kept: int | None) -> Sequence[int]:
    return token_ids if kept is None else token_ids[-kept:]


def rendered(
    messages: Sequence[ConversationMessage], served: ServedRun, variables: Mapping[str, Any], add_special_tokens: bool = False,
    kept: int | None = None,
) -> Prompt:  # fmt: skip
    """The prompt that the chat template makes of messages with its ``variables``, tools among them. It may take long, and is for
    ``READERS``. ``kept``: as of ``num_kept``.

    Raises ApiError if the messages are empty, too long, not supported, or refused by the template.
    """
    tokenizer, has_tools = served.tokenizer, knows_tools(served.tokenizer.tool_template)
    documents = [_document(index, message, has_tools) for index, message in enumerate(messages)]
    _name_results(documents)
    _check_length("".join(text_of(document.get("content")) for document in documents), served, "messages", kept)
    if (tools := variables.get("tools")) is not None:
        _check_length(json.dumps(tools), served, "tools", kept)
    try:
        text = _text(documents, tokenizer, variables)
        _check_length(text, served, "messages", kept)
        prompt = Prompt(_last(tokenizer.encode(text, add_special_tokens), kept), json.dumps(documents), text)
    except (UserError, TypeError, RecursionError) as error:
        raise bad_request(str(error), "messages") from None
    if not prompt.token_ids:
        raise bad_request("the chat template makes nothing of these messages", "messages")
    return prompt


def _name_results(documents: Sequence[dict[str, Any]]) -> None:
    """Give results of tools the name of the tool, by the id of its call: templates read it, and most clients send only the id."""
    calls = [call for document in documents for call in document.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
    for document in documents:
        if document["role"] == "tool" and (name := names.get(document.get("tool_call_id"))) is not None:
            document.setdefault("name", name)


def _text(documents: list[dict[str, Any]], tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str:
    """Where the template wants an object as arguments of a call and has text, the text is the value of a key of that object."""
    try:
        return tokenizer.render_chat(documents, **variables)
    except UserError:
        texts = [one for document in documents for call in document.get("tool_calls", ())
                 if isinstance((one := call["function"])["arguments"], str)]  # fmt: skip
        if not texts:
            raise
        for function in texts:
            function["arguments"] = {"arguments": function["arguments"]}
        return tokenizer.render_chat(documents, **variables)


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, for no text an empty one; None if it is anything else."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _document(index: int, message: ConversationMessage, has_tools: bool) -> dict[str, Any]:
    """For the template, which may know tools: fields that are not given left out."""
    path = f"messages[{index}]"
    if not has_tools and (message.role == "tool" or message.tool_calls):
        raise bad_request(f"{path} is of a tool, but this model's chat template knows none: send text", "messages")
    document = {name: value for name, value in message if value is not None and name not in ("prefix", "partial")}
    if isinstance(message.content, list):
        document["content"] = [dict(part) for part in message.content]
    if "tool_calls" in document:
        document["tool_calls"] = [_call(call) for call in document["tool_calls"]]
    return document


def _call(call: GivenCall) -> dict[str, Any]:
    """Templates write the arguments as JSON, so that they must not be JSON already. What a model has written as no JSON object
    stays the text that it is.
    """
    arguments: Any = call.function.arguments
    if isinstance(arguments, str) and (found := object_of(arguments)) is not None:
        arguments = found
    given = {name: value for name, value in call if name in call.model_fields_set}
    return given | {"function": dict(call.function) | {"arguments": arguments}}
