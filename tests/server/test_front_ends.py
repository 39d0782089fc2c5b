"""Requests like those of chat front-ends each get an answer. Open WebUI's Ollama requests follow its sources."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, Say

TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "A city"}}, "required": ["city"]}}}  # fmt: skip
HISTORY = [
    {"role": "system", "content": "You are helpful."}, {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
]  # fmt: skip
TEXTS = [message | {"content": "Hi?"} if isinstance(message["content"], list) else message for message in HISTORY]
TASK = [
    {"role": "user", "content": '### Task:\nWrite a title.\n### Output:\nJSON format: { "title": "your title" }\nUSER: hello'}
]
CALLED = [
    *TEXTS, {"role": "assistant", "content": "", "tool_calls": [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]  # fmt: skip
OLLAMA_CALLED = [
    *TEXTS, {"role": "assistant", "content": "", "tool_calls": [
        {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]  # fmt: skip
OPTIONS = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "seed": 42, "num_ctx": 4096, "num_batch": 512, "num_keep": 24,
    "repeat_last_n": 64, "repeat_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "tfs_z": 1, "mirostat": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5.0, "num_predict": 128, "use_mmap": True, "use_mlock": False,
    "num_thread": 2, "num_gpu": 0, "stop": ["</s>"],
}  # fmt: skip

SENT: dict[str, tuple[str, dict[str, Any] | None]] = {
    "Open WebUI: models": ("/v1/models", None),
    "Open WebUI: chat": (CHAT, {"stream": True, "model": "tiny", "messages": HISTORY, "stream_options": {"include_usage": True}}),
    "Open WebUI: chat with parameters": (CHAT, {
        "stream": True, "model": "tiny", "messages": TEXTS, "temperature": 0.8, "top_p": 0.9, "max_tokens": 128, "seed": 0,
        "frequency_penalty": 0, "presence_penalty": 0, "stop": ["</s>"], "logit_bias": {}, "response_format": {"type": "text"},
        "reasoning_effort": "medium",
    }),
    "Open WebUI: title": (CHAT, {
        "model": "tiny", "messages": TASK, "stream": False, "max_completion_tokens": 1000}),
    "Open WebUI: tags": (CHAT, {"model": "tiny", "messages": TASK, "stream": False}),
    "Open WebUI: native tools": (CHAT, {"stream": True, "model": "tiny", "messages": CALLED, "tools": [TOOL]}),
    "Open WebUI: Ollama's models": ("/api/tags", None),
    "Open WebUI: Ollama's version": ("/api/version", None),
    "Open WebUI: Ollama's loaded models": ("/api/ps", None),
    "Open WebUI: Ollama's details": ("/api/show", {"name": "tiny:latest", "model": "tiny:latest"}),
    "Open WebUI: Ollama's chat": ("/api/chat", {
        "model": "tiny:latest", "messages": TEXTS, "options": OPTIONS, "stream": True, "keep_alive": "5m", "think": True,
    }),
    "Open WebUI: Ollama's title": ("/api/chat", {
        "model": "tiny:latest", "messages": TASK, "stream": False, "options": {"num_predict": 1000}}),
    "Open WebUI: Ollama's tools": ("/api/chat", {
        "model": "tiny:latest", "messages": OLLAMA_CALLED, "stream": True, "tools": [TOOL]}),
    "Open WebUI: Ollama's completion": ("/api/generate", {"model": "tiny:latest", "prompt": "hello", "stream": True}),
    "Open WebUI: unloading": ("/api/generate", {"model": "tiny:latest", "keep_alive": 0, "prompt": ""}),
    "LibreChat: models": ("/v1/models", None),
    "LibreChat: chat": (CHAT, {
        "model": "tiny", "user": "66f0c1", "stream": True, "temperature": 1, "top_p": 1, "presence_penalty": 0,
        "messages": HISTORY, "frequency_penalty": 0, "stream_options": {"include_usage": True},
        "stop": ["<|im_end|>", "||>", "\nUser:"],
    }),
    "LibreChat: title": (CHAT, {
        "model": "tiny", "temperature": 0.2, "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 75, "stream": False,
        "messages": [{"role": "system", "content": "Write a concise title."}, {"role": "user", "content": "||>User:"}],
    }),
    "LibreChat: title as a structure": (CHAT, {
        "model": "tiny", "messages": TEXTS, "stream": False, "tool_choice": {"type": "function", "function": {"name": "title"}},
        "tools": [{"type": "function", "function": {"name": "title", "parameters": {
            "type": "object", "properties": {"title": {"type": "string"}, "language": {"type": "string"}},
            "required": ["language", "title"], "additionalProperties": False,
            "$schema": "http://json-schema.org/draft-07/schema#"}}}],
    }),
    "LibreChat: agents": (CHAT, {
        "model": "tiny", "messages": CALLED, "stream": True, "tools": [TOOL], "parallel_tool_calls": True, "user": "66f0c1",
        "stream_options": {"include_usage": True}, "n": 1,
    }),
    "LM Studio: models": ("/api/v0/models", None),
    "Cline: chat": (CHAT, {
        "model": "tiny", "messages": TEXTS, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}),
    "Continue: completion": (COMPLETIONS, {
        "model": "tiny", "prompt": "def add(a, b):\n", "max_tokens": 64, "temperature": 0.01, "stream": True,
        "stop": ["\n\n", "<|endoftext|>"],
    }),
    "Continue: Ollama's completion": ("/api/generate", {
        "model": "tiny", "prompt": "def add(", "raw": True, "options": {"num_predict": 64, "temperature": 0.01, "stop": ["\n\n"]},
        "keep_alive": 1800, "stream": True,
    }),
    "llama.cpp's page": (CHAT, {
        "messages": TEXTS, "stream": True, "cache_prompt": True, "samplers": "edkypmxt", "temperature": 0.8, "dynatemp_range": 0,
        "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1, "xtc_probability": 0,
        "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "max_tokens": 64,
        "timings_per_token": True, "reasoning_format": "auto", "return_progress": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_what_a_front_end_sends_is_answered(say: Say, name: str) -> None:
    path, body = SENT[name]
    site = say("hermes", "Four.")
    response = site.client.get(path) if body is None else site.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "error" not in response.text
    last = response.text.replace("data: [DONE]", "").split()[-1].removeprefix("data: ")
    assert isinstance(json.loads(last if body is not None and body.get("stream") else response.text), dict)
    is_question = body is not None and bool(body.get("messages") or body.get("prompt"))
    assert len(site.engine.requests) == is_question
