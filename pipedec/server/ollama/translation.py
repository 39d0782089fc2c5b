"""From Ollama's requests to OpenAI's, and errors about those back to Ollama's names."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from pipedec.server.bodies import translated
from pipedec.server.conversation import THINKING
from pipedec.server.errors import bad_request
from pipedec.server.ollama.protocol import OllamaBody, OllamaChatBody, OllamaGenerateBody, Options
from pipedec.server.protocol import ChatBody, CompletionBody, ConversationMessage, EngineFields

_NAMES = {"max_tokens": "options.num_predict", "response_format": "format", "repetition_penalty": "options.repeat_penalty"}
_OPTIONS = [name for name in Options.model_fields if name != "num_predict"]
_NAME = re.compile(rf"^({'|'.join(_OPTIONS)})\b|(?<![\w.])({'|'.join(_NAMES)})\b")


def own_names(text: str) -> str:
    """The text with Ollama's names of fields."""
    return _NAME.sub(lambda name: _NAMES.get(name[0], f"options.{name[0]}"), text)


def chat_of_messages(body: OllamaChatBody) -> ChatBody:
    """The body of ``/api/chat`` as OpenAI has it. Raises ApiError as ``translated``."""
    tools = None if body.tools is None else [tool.model_dump(exclude_unset=True) for tool in body.tools]
    return _chat(body, linked(body.messages or ()), tools)


def chat_of_prompt(body: OllamaGenerateBody) -> ChatBody:
    """A chat whose last message is the prompt. Raises ApiError as ``translated``."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, [*system, {"role": "user", "content": body.prompt}])


def raw_prompt(body: OllamaGenerateBody) -> CompletionBody:
    """A completion of the prompt as it is. Raises ApiError as ``translated``, or if there is a system message, too."""
    if body.system:
        raise bad_request("system goes without raw: put it into the prompt", "system")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return translated(CompletionBody, prompt=body.prompt, logprobs=logprobs, **_sampling(body))


def linked(messages: Sequence[ConversationMessage]) -> list[dict[str, Any]]:
    """Messages whose calls have ids, and whose results have that of their call: the first one of their tool that has no result.

    The ids are of nine digits, as templates of Mistral's models want them.
    """
    waiting: dict[str, deque[str]] = defaultdict(deque)  # ids of calls without a result, by the tool's name
    found = []
    for place, message in enumerate(messages):
        fields = message.model_dump(exclude_unset=True)
        for index, call in enumerate(fields.get("tool_calls") or ()):
            call["function"].pop("index", None)
            call.setdefault("type", "function")
            waiting[call["function"]["name"]].append(call.setdefault("id", f"{place:05d}{index:04d}"))
        if message.role == "tool":
            name = fields.pop("tool_name", None) or message.name
            if isinstance(name, str) and waiting[name]:
                fields = {"name": name, "tool_call_id": waiting[name].popleft()} | fields
        found.append(fields)
    return found


def _chat(body: OllamaBody, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> ChatBody:
    top_logprobs = body.top_logprobs if body.logprobs else None
    return translated(
        ChatBody, messages=messages, tools=tools, logprobs=body.logprobs, top_logprobs=top_logprobs,
        **_sampling(body), **_thinking(body.think),
    )  # fmt: skip


def _sampling(body: OllamaBody) -> dict[str, Any]:
    options = body.options or Options.model_construct()
    limit = options.num_predict or 0
    fields = {name: getattr(options, name) for name in _OPTIONS}
    fields |= {name: getattr(body, name) for name in EngineFields.model_fields}
    return fields | {"max_tokens": limit if limit > 0 else None, "response_format": _format(body.format)}


def _format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not isinstance(given, dict):
        return {"type": "json_object"} if given else None
    return {"type": "json_schema", "schema": given}


def _thinking(given: bool | str | None) -> dict[str, Any]:
    if given is False:
        return {"reasoning_effort": "none", "include_reasoning": False}
    return {"chat_template_kwargs": dict.fromkeys(THINKING, True)} if given is True else {"reasoning_effort": given or None}
