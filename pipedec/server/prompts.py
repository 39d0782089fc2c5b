"""From prompts and messages to token ids. What is too long is refused before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.sampling import check_token_ids
from pipedec.server.errors import bad_request
from pipedec.server.front import ServedRun
from pipedec.server.protocol import ConversationMessage, GivenCall, Prompts
from pipedec.server.workers import Workers
from pipedec.text.chat_template import text_of
from pipedec.text.tokenizer import Tokenizer
from pipedec.text.tool_calls import knows_tools

_LONG_CHARACTERS = 4000  # longer texts are tokenized in a thread, so that other requests do not wait
READERS = Workers(2, most=64, seconds=30.0)
_OWN_VARIABLES = ("messages", "add_generation_prompt", "tokenize", "tools", "documents")


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and as the client wrote it."""

    token_ids: Sequence[int]
    text: str


async def tokenized(given: Prompts, served: ServedRun, max_prompts: int, add_special_tokens: bool = True) -> list[Prompt]:
    """The prompts of ``/v1/completions``: one or several, as text or as token ids.

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
            _check_length(prompt, served, "prompt")
        elif len(prompt) >= context:
            raise bad_request(f"the prompt has {len(prompt)} tokens, but the model's context is {context}", "prompt")
        else:
            check_tokens(prompt, served.vocab_size, "prompt")
    if sum(map(len, prompts)) > _LONG_CHARACTERS:
        return await READERS.run(partial(_prompts, prompts, served.tokenizer, add_special_tokens))
    return _prompts(prompts, served.tokenizer, add_special_tokens)


def check_tokens(token_ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raises ApiError if one is not in the vocabulary."""
    try:
        check_token_ids(field, token_ids, vocab_size)
    except UserError as error:
        raise bad_request(str(error), field) from None


def _check_length(text: str, served: ServedRun, param: str) -> None:
    try:
        served.tokenizer.check_length(text, served.max_model_len)
    except UserError as error:
        raise bad_request(str(error), param) from None


def _prompts(prompts: Sequence[str | Sequence[int]], tokenizer: Tokenizer, add_special_tokens: bool) -> list[Prompt]:
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append(Prompt(prompt, tokenizer.decode(prompt)))
            continue
        try:
            token_ids = tokenizer.encode(prompt, add_special_tokens)
        except UserError as error:
            raise bad_request(str(error), "prompt") from None
        if not token_ids:
            raise bad_request("prompt has no tokens: give more text", "prompt")
        found.append(Prompt(token_ids, prompt))
    return found


def rendered(
    messages: Sequence[ConversationMessage], served: ServedRun, begins_answer: bool, variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Prompt:  # fmt: skip
    """The prompt that the chat template makes of messages, with further ``variables`` and with tools that it shows to the model.
    It may take long, and is for ``READERS``.

    ``begins_answer``: it ends where the answer of the assistant begins. Raises ApiError if the messages are empty, too long, not
    supported, or refused by the template.
    """
    tokenizer, has_tools = served.tokenizer, knows_tools(served.tokenizer.tool_template)
    documents = [_document(index, message, has_tools) for index, message in enumerate(messages)]
    _check_length("".join(text_of(document.get("content")) for document in documents), served, "messages")
    if wrong := [name for name in variables if name in _OWN_VARIABLES]:
        raise bad_request(f"chat_template_kwargs must not have {wrong[0]}", "chat_template_kwargs")
    if tools is not None:
        _check_length(json.dumps(tools), served, "tools")
        variables = {**variables, "tools": tools}
    try:
        text = _text(documents, served, begins_answer, variables)
        _check_length(text, served, "messages")
        prompt = Prompt(tokenizer.encode(text, add_special_tokens=False), json.dumps(documents))
    except (UserError, TypeError, RecursionError) as error:
        raise bad_request(str(error), "messages") from None
    if not prompt.token_ids:
        raise bad_request("the chat template makes nothing of these messages", "messages")
    return prompt


def _text(documents: list[dict[str, Any]], served: ServedRun, begins_answer: bool, variables: Mapping[str, Any]) -> str:
    """Where the template wants an object as arguments of a call and has text, the text is the value of a key of that object."""
    try:
        return served.tokenizer.render_chat(documents, begins_answer, **variables)
    except UserError:
        texts = [one for document in documents for call in document.get("tool_calls", ())
                 if isinstance((one := call["function"])["arguments"], str)]  # fmt: skip
        if not texts:
            raise
        for function in texts:
            function["arguments"] = {"arguments": function["arguments"]}
        return served.tokenizer.render_chat(documents, begins_answer, **variables)


def _document(index: int, message: ConversationMessage, has_tools: bool) -> dict[str, Any]:
    """For the template, which may know tools: fields that are not given left out."""
    path = f"messages[{index}]"
    if not has_tools and (message.role == "tool" or message.tool_calls):
        raise bad_request(f"{path} is of a tool, but this model's chat template knows none: send text", "messages")
    document = {name: value for name, value in message if value is not None}
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
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(arguments or "{}")
            arguments = found if isinstance(found, dict) else arguments
    given = {name: value for name, value in call if name in call.model_fields_set}
    return given | {"function": dict(call.function) | {"arguments": arguments}}
