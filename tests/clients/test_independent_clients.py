"""Programs that others wrote for OpenAI's API or for vLLM, each in a virtual environment of its own (``make test-clients``)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from clients.conftest import MODEL, Server, client_python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pipedec.verify.reference import Reference

pytestmark = pytest.mark.slow

RUN_SECONDS = 300
REQUESTS = 6
TOKENS = 96  # of an answer: longer than the second for which /metrics may say what it said before
QUESTION = "Natalia sold 12 clips in April. How many?"
INCOMPLETE = "\ufffd"


def ran(name: str, arguments: list[str], directory: Path, **environment: str) -> str:
    """What a program of the virtual environment ``name`` prints; fails unless it ends with status 0."""
    command = [str(client_python(name).parent / arguments[0]), *arguments[1:]]
    surroundings = {**os.environ, "HOME": str(directory), "HF_HOME": str(directory / "hf"), **environment}
    surroundings.pop("PYTHONPATH", None)
    ended = subprocess.run(
        command, cwd=directory, env=surroundings, capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


@pytest.fixture
def chatted(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> str:
    """The greedy answer of transformers to the question, of 12 tokens."""
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return tokenizer.decode(reference.generate(prompt, 12), skip_special_tokens=True).rstrip(INCOMPLETE)


@pytest.mark.parametrize("flags", [[], ["--no-stream"]], ids=["stream", "whole"])
def test_llm(server: Server, tmp_path: Path, chatted: str, flags: list[str]) -> None:
    models = [{"model_id": "pipedec", "model_name": MODEL, "api_base": server.url}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    asked = ["llm", "-m", "pipedec", QUESTION, "-o", "temperature", "0", "-o", "max_tokens", "12", "--key", "any", *flags]
    assert ran("llm", asked, tmp_path, LLM_USER_PATH=str(tmp_path)).strip() == chatted.strip()


LANGCHAIN = """
import asyncio, json, sys
from langchain_openai import ChatOpenAI, OpenAI
url, question = sys.argv[1:]
given = dict(base_url=url, api_key="any", model="tiny", temperature=0, max_tokens=12)
chat = ChatOpenAI(**given, stream_usage=True)
chunks = list(chat.stream(question))
print(json.dumps({
    "invoked": chat.invoke(question).content,
    "streamed": "".join(chunk.content for chunk in chunks),
    "usage": [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata],
    "batch": [answer.content for answer in chat.batch([question] * 3)],
    "awaited": asyncio.run(chat.ainvoke(question)).content,
    "completed": OpenAI(**given).invoke(question),
}))
"""


def test_langchain(server: Server, tmp_path: Path, chatted: str) -> None:
    said = json.loads(ran("langchain", ["python", "-c", LANGCHAIN, server.url, QUESTION], tmp_path))
    assert [said["invoked"], said["streamed"], said["awaited"], *said["batch"]] == [chatted] * 6
    assert sum(said["usage"]) == 12 and said["completed"]


OLLAMA = """
import json, sys
import ollama
url, question = sys.argv[1:]
client, options = ollama.Client(url), {"temperature": 0, "num_predict": 12}
asked = dict(model=client.list().models[0].model, messages=[{"role": "user", "content": question}], options=options)
parts = list(client.chat(**asked, stream=True))
prompted = dict(model=asked["model"], prompt=question, options=options)
print(json.dumps({
    "chatted": client.chat(**asked).message.content,
    "streamed": "".join(part.message.content for part in parts),
    "generated": client.generate(**prompted).response,
    "pieces": "".join(part.response for part in client.generate(**prompted, stream=True)),
    "counts": [parts[-1].eval_count, client.chat(**asked, logprobs=True).eval_count],
    "loaded": client.chat(model=asked["model"]).done_reason,
    "chosen": json.loads(client.chat(**asked | {"options": {}}, format={"enum": ["yes", "no"]}).message.content),
    "context": client.ps().models[0].context_length,
    "can": client.show(asked["model"]).capabilities,
}))
try:
    client.chat(**asked | {"model": "other"})
except ollama.ResponseError as error:
    assert error.status_code == 404 and "other" in error.error
"""


def test_ollama(server: Server, tmp_path: Path, chatted: str) -> None:
    said = json.loads(ran("ollama", ["python", "-c", OLLAMA, server.root, QUESTION], tmp_path))
    assert [said[name] for name in ("chatted", "streamed", "generated", "pieces")] == [chatted] * 4
    assert said["counts"] == [12, 12] and said["loaded"] == "load" and said["chosen"] in ("yes", "no")
    assert said["context"] > 0 and said["can"] == ["completion"]


def test_lm_evaluation_harness_finds_the_log_likelihoods_of_transformers(
    server: Server, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked = {"Natalia sold 12 clips in April, and": (" half as many in May.", " 24 clips."), "Two and two is": (" four", " five")}
    questions = [{"question": question, "choices": choices, "answer": 0} for question, choices in asked.items()]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {
        "task": "local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "local.yaml").write_text(json.dumps(task))
    model = f"model={MODEL},base_url={server.url}/completions,tokenizer={server.target},num_concurrent=2,max_retries=1"
    arguments = ["lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "local"]
    arguments += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    ran("lmeval", arguments, tmp_path, HF_HUB_OFFLINE="1")
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    target = AutoModelForCausalLM.from_pretrained(server.target)
    for question, likelihoods in zip(questions, found, strict=True):
        for choice, (likelihood, is_greedy) in zip(question["choices"], likelihoods, strict=True):
            expected, expected_greedy = log_likelihood(target, tokenizer, str(question["question"]), choice)
            assert float(likelihood) == pytest.approx(expected, abs=1e-3) and str(is_greedy) == str(expected_greedy)


@torch.inference_mode()
def log_likelihood(model: Any, tokenizer: PreTrainedTokenizerBase, context: str, choice: str) -> tuple[float, bool]:
    """Of a choice after a context, and whether the model would say it."""
    ids, skipped = tokenizer(context + choice)["input_ids"], len(tokenizer(context)["input_ids"])
    logprobs = model(torch.tensor([ids])).logits[0, skipped - 1 : -1].log_softmax(-1)
    said = torch.tensor(ids[skipped:])
    return float(logprobs.gather(1, said[:, None]).sum()), bool((logprobs.argmax(-1) == said).all())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(server: Server, tmp_path: Path, endpoint: str) -> None:
    arguments = ["aiperf", "profile", "-m", MODEL, "--url", server.root, "--endpoint-type", endpoint, "--streaming"]
    arguments += ["--tokenizer", str(server.target), "--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "simple"]
    arguments += [
        "--isl",
        "32",
        "--osl",
        "8",
        "--extra-inputs",
        "ignore_eos:true",
        "--output-artifact-dir",
        str(tmp_path / "out"),
    ]
    ran("aiperf", arguments, tmp_path)
    figures = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == REQUESTS and "error_request_count" not in figures
    assert figures["time_to_first_token"]["avg"] > 0 and figures["inter_token_latency"]["avg"] > 0


@pytest.mark.parametrize("form", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(server: Server, tmp_path: Path, form: str) -> None:
    report = tmp_path / "report.json"
    arguments = ["guidellm", "run", "--backend", f"kind=openai_http,target={server.root},model={MODEL},request_format={form}"]
    arguments += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    arguments += ["--tokenizer", f"kind=hf_auto,model={server.target}"]
    arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    ran("guidellm", [*arguments, "--output", f"kind=json,path={report}", "--disable-progress"], tmp_path)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == REQUESTS and not requests["errored"]
    assert all(request["output_tokens"] == 8 for request in requests["successful"])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(server: Server, tmp_path: Path, backend: str) -> None:
    """Only the client's modules of vLLM, which load without a GPU and without its compiled parts."""
    program = (
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
    )
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    arguments = ["python", "-c", program, "--backend", backend, "--endpoint", path, "--base-url", server.root, "--model", MODEL]
    arguments += ["--tokenizer", str(server.target), "--dataset-name", "random", "--random-input-len", "32", "--ignore-eos"]
    arguments += ["--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS)]
    arguments += ["--save-result", "--result-filename", "result.json"]
    printed = ran("vllm", arguments, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (REQUESTS, TOKENS * REQUESTS)
    assert "Speculative Decoding" in printed, "it reads the counters of /metrics"
