"""From the body of Anthropic's Messages API to OpenAI's: messages, tools, thoughts and the form of the answer.

Knows no HTTP and no responses.
"""

from __future__ import annotations

from typing import Any

from pipedec.server.anthropic.protocol import (
    ConversationBody,
    Message,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from pipedec.server.bodies import translated
from pipedec.server.conversation import THINKING
from pipedec.server.errors import bad_request
from pipedec.server.protocol import ChatBody, EngineFields

_BILLING = "x-anthropic-billing-header:"  # a block of Claude Code's system prompt that is for Anthropic's servers
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_AS_THEY_ARE = ("temperature", "top_p", "top_k", *EngineFields.model_fields)


def chat_body_of(body: ConversationBody, thinks: bool) -> ChatBody:
    """The same conversation, whose ``max_tokens`` are left to ``chat_of``. Raises ApiError for one that ends with calls.

    Args:
        thinks: the model is known to think.
    """
    messages = _messages(body)
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise bad_request("messages end with a tool_use: send the results of the tools", "messages")
    fields = {name: getattr(body, name) for name in _AS_THEY_ARE} if isinstance(body, MessagesBody) else {}
    return translated(
        ChatBody,
        **fields,
        messages=messages,
        continue_final_message=continues,
        stop=body.stop_sequences if isinstance(body, MessagesBody) else None,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        **({} if body.tool_choice is None else _tool_choice(body.tool_choice)),
        response_format=None if body.form is None else {"type": "json_schema", "schema": body.form.document},
        **(_thinking(body) if thinks else {"chat_template_kwargs": body.chat_template_kwargs}),
    )


def _thinking(body: ConversationBody) -> dict[str, Any]:
    thinking, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinking is not None:
        variables |= dict.fromkeys(THINKING, thinking.type != "disabled")
    is_limited = thinking is not None and thinking.type == "enabled"
    return {
        "chat_template_kwargs": variables | (body.chat_template_kwargs or {}),
        "thinking_token_budget": thinking.budget_tokens if thinking is not None and is_limited else None,
        "include_reasoning": thinking is None or thinking.display != "omitted",
    }


def _tool(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": _CHOICES.get(choice.type, named), "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(body: ConversationBody) -> list[dict[str, Any]]:
    """In OpenAI's form: the system prompt first, and turns of the user in a row as one, as many chat templates want it.

    A system message within the conversation is text of the user's turn, marked as Claude Code does for models that know none.
    """
    texts = [text for text in _texts(body.system) if not text.startswith(_BILLING)]
    messages = list(body.messages)
    while messages and messages[0].role == "system":
        texts += _texts(messages.pop(0).content)
    found: list[dict[str, Any]] = [{"role": "system", "content": _parts(texts)}] if texts else []
    for message in messages:
        if message.role == "assistant":
            found.append(_assistant(message))
            continue
        found += _results(message)
        texts = _texts(message.content)
        if message.role == "system":
            texts = [f"<system-reminder>\n{text}\n</system-reminder>" for text in texts]
        if found and found[-1]["role"] == "user":
            found[-1]["content"] += _parts(texts)
        elif texts:
            found.append({"role": "user", "content": _parts(texts)})
    return found


def _assistant(message: Message) -> dict[str, Any]:
    blocks = [] if isinstance(message.content, str) else message.content
    calls = []
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return (
        {"role": "assistant", "content": _parts(_texts(message.content))}
        | ({"reasoning_content": thoughts} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _results(message: Message) -> list[dict[str, Any]]:
    blocks = [] if isinstance(message.content, str) else message.content
    return [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]


def _result(block: ToolResultBlock) -> dict[str, Any]:
    texts = [block.content] if isinstance(block.content, str) else [part.shown for part in block.content or ()]
    failed = {"is_error": True} if block.is_error else {}
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _parts(texts)} | failed


def _texts(content: Any) -> list[str]:
    """The texts of content that is one, blocks, or not there."""
    if isinstance(content, str):
        return [content]
    return [block.text for block in content or () if isinstance(block, TextBlock)]


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
