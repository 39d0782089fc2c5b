"""Faces of a running server: fields of its answers, its metrics, its log, and the files that it and its clients write.

A real ``pipedec serve`` of the shipped pair in two stages. Of values only their types are kept.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from support.processes import wait_until
from support.programs import Started, programs
from support.serving import Serving

from golden.shapes import Shape, shape_of, shape_of_schema
from pipedec.scheduler import connect

Faces = Iterator[tuple[str, Any]]

FORMATS = ("--device", "cpu", "--dtype", "float32", "--draft-dtype", "float32")
PROMPT = "What does shutil.copytree() do?"
# A tree enters with every token, whatever is measured.
SHARED = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "method": "pipedec", "method_options": {"width": 4}}
COMPLETION = SHARED | {"prompt": PROMPT, "logprobs": 2}
CHAT = SHARED | {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 2}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
BY_TOKEN = ("choices[].logprobs.top_logprobs[]",)  # objects whose keys are data
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a completion": ("/v1/completions", COMPLETION),
    "a completion with its prompt": ("/v1/completions", COMPLETION | {"echo": True}),
    "a chat": ("/v1/chat/completions", CHAT),
    "tokens": ("/tokenize", {"prompt": PROMPT, "return_token_strs": True}),
    "text": ("/detokenize", {"tokens": [5, 6, 7]}),
    "another model": ("/v1/completions", COMPLETION | {"model": "another"}),
    "a bad value": ("/v1/completions", COMPLETION | {"temperature": -1}),
    "an unsupported field": ("/v1/completions", COMPLETION | {"suffix": "x"}),
    "no prompt": ("/v1/completions", {}),
}
LIVE = {"run", "open", "step", "close", "stats"}  # and "gap", which a reader that keeps up does not see
GETS = ("/v1/models", "/v1/models/tiny", "/v1/models/other", "/version", "/health", "/ready", "/live", "/metrics", "/nothing")


def served_faces(scratch: Path) -> Faces:
    state = scratch / "state"
    state.mkdir(mode=0o700)
    with patch.dict(os.environ, PIPEDEC_STATE_DIR=str(state)), programs() as started:
        for name in ("PIPEDEC_REDIS_URL", "PIPEDEC_REDIS_PASSWORD", "PIPEDEC_API_KEY"):
            os.environ.pop(name, None)
        serving = Serving(started("serve", *FORMATS, "--stages", "2", "--served-model-name", "tiny", "--port", "0")).wait_for(
            "ready"
        )
        with serving.client as client:
            yield from _documented(client)
            yield from _answers(client)
            yield from _live(client)
            yield from _files(started, state, scratch)
            yield from _metrics(client)
        serving.end()
        serving.ended()
        yield from _log(serving)


def _documented(client: httpx2.Client) -> Faces:
    """The OpenAPI document: for every route its parameters, and the fields of its body and of its responses."""
    document = client.get("/openapi.json").json()
    known = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = f"http: {method.upper()} {path}"
            yield route, [parameter["name"] for parameter in operation.get("parameters", ())]
            if body := operation.get("requestBody"):
                yield from _under(f"{route}, body", shape_of_schema(_schema_in(body), known))
            for status, response in operation["responses"].items():
                yield from _under(f"{route}, {status}", shape_of_schema(_schema_in(response), known))


def _schema_in(described: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = described.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _answers(client: httpx2.Client) -> Faces:
    """What real answers have, whole and streamed."""
    for name, (route, body) in POSTS.items():
        response = client.post(route, json=body)
        yield f"http answer: {name}", [response.status_code, *_own_headers(response)]
        yield from _under(f"http answer: {name}", shape_of(response.json(), maps=BY_TOKEN))
    for route in GETS:
        response = client.get(route)
        kind = response.headers.get("content-type", "none")
        yield f"http answer: GET {route}", [response.status_code, kind, *_own_headers(response)]
        if response.content and "json" in kind:
            yield from _under(f"http answer: GET {route}", shape_of(response.json()))
    for name in ("a completion", "a chat"):
        route, body = POSTS[name]
        with client.stream("POST", route, json=body | STREAMED) as response:
            lines = [line for line in response.iter_lines() if line]
        yield f"http stream: {name}", [response.status_code, response.headers["content-type"], lines[-1]]
        yield from _under(f"http stream: {name}", shape_of(*map(_data, lines[:-1]), maps=BY_TOKEN))


def _own_headers(response: httpx2.Response) -> list[str]:
    return sorted(name for name in response.headers if name not in ("date", "server", "content-length", "content-type"))


def _live(client: httpx2.Client) -> Faces:
    """The frames of the live feed, by kind, as recordings have them. Requests follow each other until all kinds have come."""
    frames: dict[str, list[Any]] = {}
    last = time.monotonic() + 60
    with client.stream("GET", "/live/feed") as response, _asking(client):
        for line in response.iter_lines():
            for frame in _frames(line):
                frames.setdefault(frame["k"], []).append(frame)
            if frames.keys() >= LIVE and None not in frames["stats"][-1].values():
                break
            assert time.monotonic() < last, f"the live feed has shown only {sorted(frames)}"
    for kind, found in sorted(frames.items()):
        yield from _under(f"live frame {kind}", shape_of(*found))


@contextmanager
def _asking(client: httpx2.Client) -> Iterator[None]:
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            client.post("/v1/completions", json=COMPLETION)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
    asked.result()


def _frames(line: str) -> list[Any]:
    batch = _data(line) if line.startswith("data:") else []
    return batch if isinstance(batch, list) else [batch]


def _files(started: Started, state: Path, scratch: Path) -> Faces:
    """What is on disk, and what ``run`` holds in Redis."""
    (file,) = (file for file in state.iterdir() if file.name != "logs")
    running = json.loads(file.read_text())
    yield from _under("state directory: cluster-PLACE-RUN.json", shape_of(running))
    with connect(running["redis_url"]) as redis:
        yield "redis: fields of run", sorted(key.decode() for key in redis.hkeys(f"pipedec:{{{running['run_id']}}}:run"))
    flags = ("--prompt", PROMPT, "--max-tokens", "8", "--method", "pipedec", "--ignore-eos")
    answer = _output(started, "submit", *flags, "--json", "--logprobs", "1", "--trace", scratch / "trace.json")
    yield from _under("submit --json", shape_of(json.loads(answer), maps=("logprobs[]",)))
    yield from _under("trace", shape_of(json.loads((scratch / "trace.json").read_text())))


def _output(started: Started, *arguments: str | Path) -> str:
    process = started(*arguments)
    said, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint.decode()
    return said.decode()


def _metrics(client: httpx2.Client) -> Faces:
    """What Prometheus reads, once the cluster has told everything."""
    told = [""]

    def is_complete() -> bool:
        told[0] = client.get("/metrics").text
        return "pipedec:timesteps_total" in told[0] and 'stage="2"' in told[0]

    assert wait_until(is_complete, 60)
    for family in text_string_to_metric_families(told[0]):
        labels = sorted({label for sample in family.samples for label in sample.labels if label != "le"})
        bounds = sorted({float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels})
        yield f"metric: {family.name}", [family.type, family.documentation, labels, [str(bound) for bound in bounds]]


def _log(serving: Serving) -> Faces:
    """Lines on standard output, by event."""
    for event in sorted({line["event"] for line in serving.log}):
        yield from _under(f"log line {event}", shape_of(*serving.events(event)))


def _data(line: str) -> Any:
    return json.loads(line.removeprefix("data:"))


def _under(name: str, shape: Shape) -> Faces:
    return ((f"{name}: {path or 'itself'}", found) for path, found in shape.items())
