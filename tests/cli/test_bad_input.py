"""The user's mistakes through the real program: one clear line, a non-zero exit, nothing left running."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_pair import CONTEXT, TARGET_LAYERS, Pair

from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster, process_start
from pipedec.scheduler import EmbeddedServer, connect

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Pipedec = Callable[..., Any]


def no_process(*arguments: object, **keywords: object) -> None:
    raise AssertionError("a rank or a Redis was started before the mistake was found")


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes that need no cluster to be found must be found before there is one."""
    monkeypatch.setattr("subprocess.Popen", no_process)
    monkeypatch.setattr("pipedec.cluster.processes.RankProcesses.start", no_process)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", " \n\t"], "the prompt is empty"),
        ([], "the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input"),
        (["--prompt", "a", "--prompt-file", "b"], "give --prompt or --prompt-file, not both"),
        (["--prompt", "a", "--prompt", "b", "--trace", "t"], "2 prompts: --trace and --show-threads go with one"),
        (["--prompts", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--prompt", "a", "--field", "text"], "--field names the field of the prompts in --prompts FILE: give that, too"),
        (["--prompt-file", "missing.txt"], "cannot read missing.txt: No such file or directory"),
        (["--prompt-file", "."], "cannot read .: Is a directory"),
        (["--prompt", "a", "--threads", "nonsense"], "unknown dialect 'nonsense': give one of apar, pasta, parallel"),
        (["--prompt", "a", "--threads", "missing.json"], "missing.json"),
        (["--prompt", "a", "--show-threads"], "--show-threads goes with --threads, and without --json"),
        (["--prompt", "a", "--threads", "apar", "--show-threads", "--json"], "--show-threads goes with --threads, and without"),
        (["--prompt", "a", "--regex", "a", "--choice", "b"], "regex and choice"),
        (["--prompt", "a", "--regex", "(a"], "unclosed group"),
        (["--prompt", "a", "--json-schema", '{"type": "obj"}'], "obj"),
        (["--prompt", "a", "--json-schema", "{"], "JSON"),
        (["--prompt", "a", "--json-schema", "missing.json"], "cannot read missing.json"),
        (["--prompt", "a", "--grammar", "missing.lark"], "cannot read missing.lark"),
        (["--prompt", "a", "--regex", "a", "--ignore-eos"], "ignore_eos"),
        (["--prompt", "a", "--regex", "a", "--threads", "apar"], "threads"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be at least 1, not 0"),
        (["--prompt", "a", "--max-tokens", "many"], "'many' is not a valid integer"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be finite and at least 0, not -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature must be finite and at least 0, not nan"),
        (["--prompt", "a", "--top-k", "-2"], "top_k must be at least 1, or 0 or -1 for all tokens, not -2"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be above 0 and at most 1, not 0.0"),
        (["--prompt", "a", "--min-p", "2"], "min_p must be between 0 and 1, not 2.0"),
        (["--prompt", "a", "--seed", "-1"], "seed must be at least 0 and below 2**64, not -1"),
        (["--prompt", "a", "--stop", ""], "stop must be strings that are not empty"),
        (["--prompt", "a", "--repetition-penalty", "0"], "repetition_penalty must be finite and above 0, not 0.0"),
        (["--prompt", "a", "--presence-penalty", "3"], "presence_penalty must be between -2 and 2, not 3.0"),
        (["--prompt", "a", "--frequency-penalty", "-3"], "frequency_penalty must be between -2 and 2, not -3.0"),
        (["--prompt", "a", "--logit-bias", "five"], "--logit-bias five: write TOKEN_ID=VALUE, like 42=-5"),
        (["--prompt", "a", "--logit-bias", "5=500"], "logit_bias must be between -100 and 100"),
        (["--prompt", "a", "--logprobs", "21"], "logprobs must be between 0 and 20, not 21"),
        (["--prompt", "a", "--width", "0"], "width: must be between 1 and 4096, not 0"),
        (["--prompt", "a", "--children", "-1"], "children: must be between 1 and 4096, not -1"),
        (["--prompt", "a", "--method", "stpp", "--depth", "0"], "depth: must be between 1 and 64, not 0"),
        (["--prompt", "a", "--method", "stpp", "--rows", "0"], "rows: must be between 1 and 4096, not 0"),
        (["--prompt", "a", "--method", "magic"], "'magic' is not one of 'pp', 'stpp', 'pipedec'"),
        (["--prompt", "a", "--trace", "nowhere/trace.json"], "--trace nowhere/trace.json: there is no directory nowhere"),
        (["--prompt", "a", "--trace", "."], "--trace .: cannot write there"),
        (["--prompt", "a", "--stages", str(TARGET_LAYERS + 1)], f"9 stages, but the target has {TARGET_LAYERS} layers"),
        (["--prompt", "a", "--stages", "0"], "'--stages': 0 is not in the range"),
        (["--prompt", "a", "--stages", "2", "--groups", "3"], "groups: 3 groups need at least as many stages, but there are 2"),
        (["--prompt", "a", "--stages", "2", "--layers", "4,5"], "layers sum to 9, the target has 8"),
        (["--prompt", "a", "--stages", "2", "--layers", "8,0"], "'--layers': 0 is not in the range"),
        (
            ["--prompt", "a", "--stages", "2", "--layers", "3,3,2"],
            "layers: 3 entries for 2 stages: give one number per stage, or auto",
        ),
        (["--prompt", "a", "--layers", "four"], "'--layers': 'four' is not a valid integer"),
        (["--prompt", "a", "--dtype", "int4"], "'--dtype': 'int4' is not one of 'auto', 'float32',"),
        (["--prompt", "a", "--device", "tpu"], "'--device': 'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["--prompt", "a", "--draft", "none", "--method", "pipedec"], "method pipedec needs a draft model"),
        (["--prompt", "a", "--draft", "none", "--method", "stpp"], "method stpp needs a draft model"),
        (["--prompt", "a", "--draft", "nowhere"], "nowhere is not a directory"),
        (["--prompt", "a", "--target", "nowhere"], "nowhere is not a directory"),
        (["--prompt", "a", "--bita", "nowhere"], "nowhere/config.json cannot be read: give a directory that pipedec train bita"),
        (["--prompt", "a", "--bita", "."], "config.json cannot be read: give a directory that pipedec train bita wrote"),
        (["--prompt", "a", "--method", "bita"], "method bita needs what pipedec train bita has learned for this target"),
        (["--prompt", "a", "--method", "bita", "--bita", "none"], "method bita needs what pipedec train bita has learned"),
        (
            ["--prompt", "a", "--shape", "nonsense"],
            "'nonsense' is not one of 'layers', 'eagle2', 'opt-tree', 'sequoia', 'likeliest', 'efficient', ",
        ),
        (["--prompt", "a", "--proposers", "oracle"], "proposers: must be one or more of draft, ngrams, not oracle"),
        (["--prompt", "a", "--depth", "4"], "method pipedec-bestfirst has no option 'depth': it is an option of stpp, bita"),
        (
            ["--prompt", "a", "--method", "pp", "--width", "4"],
            "method pp has no option 'width': it is an option of stpp, pipedec",
        ),
        (
            ["--prompt", "a", "--method", "stpp", "--shape", "full"],
            "shape: must be one of layers, eagle2, opt-tree, sequoia, not full",
        ),
        (["--prompt", "a", "--method", "pipedec", "--shape", "full"], "has no option 'shape': it is an option of stpp, bita"),
        (["--prompt", "a", "--max-model-len", "0"], "'--max-model-len': 0 is not in the range"),
        (["--prompt", "a", "--max-num-seqs", "0"], "'--max-num-seqs': 0 is not in the range"),
        (["--prompt", "a", "--kv-cache-memory", "much"], "kv_cache_memory: must be a number of bytes like 4GiB, 512MB or"),
        (["--prompt", "a", "--kv-cache-memory", "1KB"], "but a few hundred tokens need 64.0 KiB: give a larger --kv-cache-mem"),
        (["--prompt", "a", "--max-waiting", "-1"], "'--max-waiting': -1 is not in the range"),
        (["--prompt", "a", "--colour", "red"], "No such option '--colour'"),
    ],
)
@pytest.mark.usefixtures("nothing_starts")
def test_generate_refuses(
    arguments: list[str], message: str, pipedec: Pipedec, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in pipedec("generate", *pair.flags, *arguments).refused()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("by_file", [True, False])
def test_a_prompt_that_is_not_utf8(by_file: bool, pipedec: Pipedec, pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"caf\xe9")
    if by_file:
        assert pipedec("generate", *pair.flags, "--prompt-file", file).refused() == f"{file} is not UTF-8 text"
    else:
        assert pipedec("generate", *pair.flags, stdin=b"caf\xe9").refused() == "standard input is not UTF-8 text"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there(pipedec: Pipedec, pair: Pair) -> None:
    assert pipedec("generate", *pair.flags, "--prompt", "a", "--device", "cuda").refused() == (
        "--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu"
    )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.failure_case("M4")
def test_models_that_do_not_belong_together(pipedec: Pipedec, pair: Pair) -> None:
    ended = pipedec("generate", "--prompt", "a", "--target", pair.target, "--draft", pair.foreign_draft)
    assert "has a different tokenizer than the target" in ended.refused()
    assert "give --draft DIR beside --target" in pipedec("generate", "--prompt", "a", "--target", pair.target).refused()
    assert "nowhere is not a directory" in pipedec("generate", "--prompt", "a", "--target", "nowhere").refused()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.write_bytes(weights.read_bytes()[:-1000]), "model.safetensors is not a whole safetensors file"),
        (lambda weights: weights.write_bytes(b"<html>not found</html>"), "model.safetensors is not a whole safetensors file"),
        (lambda weights: weights.unlink(), "holds neither model.safetensors nor"),
        (lambda weights: (weights.parent / "config.json").unlink(), "config.json is missing"),
        (lambda weights: (weights.parent / "config.json").write_text("{"), "config.json: not valid JSON"),
    ],
    ids=["truncated", "html", "none", "no config", "half a config"],
)
def test_a_damaged_checkpoint(damage: Callable[[Path], Any], message: str, pipedec: Pipedec, pair: Pair, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pair.target, tmp_path / "copy"))
    damage(copy / "model.safetensors")
    assert message in pipedec("generate", "--prompt", "a", "--target", copy, "--draft", pair.draft).refused()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors is not a whole safetensors file"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is not a whole safetensors file"),
        (lambda path: (path / "config.json").unlink(), "config.json cannot be read: give a directory that pipedec train bita"),
        (lambda path: (path / "config.json").write_text("[]"), "config.json is not of format pipedec-bita-1"),
        (lambda path: rewrite(path / "config.json", '"num_masks": 3', '"num_masks": 3.0'), "config.json is damaged"),
        (lambda path: rewrite(path / "config.json", '"num_masks": 3', '"num_masks": 4'), "tensor masks has shape [3, 32], but"),
        (lambda path: rewrite(path / "config.json", '"target": "', '"target": "f'), "was trained for another target than"),
    ],
    ids=["truncated", "no tensors", "no config", "foreign", "another kind", "other masks", "other target"],
)
@pytest.mark.parametrize("method", ["bita", "pp"])
def test_a_damaged_bita(
    damage: Callable[[Path], Any], message: str, method: str, pipedec: Pipedec, pair: Pair, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(pair.bita, tmp_path / "copy"))
    damage(copy)
    assert message in pipedec("generate", *pair.flags, "--prompt", "a", "--bita", copy, "--method", method).refused()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def rewrite(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.fast_cases
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--depth", "4"], "depth 4, but this BiTA was trained with 3 masks: lower --depth"),
        (["--children", "1400"], "a forecast of 4200 tokens is more than 4096: lower --depth or --children"),
        (["--children", "20", "--shape", "full"], "a tree of 33684 rows is more than 4096: lower --depth or --children"),
        (["--width", "4"], "method bita has no option 'width': it is an option of stpp, pipedec, pipedec-bestfirst"),
    ],
)
def test_a_tree_that_the_masks_of_a_running_cluster_cannot_grow(
    flags: list[str], message: str, known_resident: LocalCluster, pipedec: Pipedec
) -> None:
    assert pipedec("submit", "--method", "bita", "--prompt", "a", *flags).refused() == message
    assert pipedec("submit", "--method", "bita", "--prompt", "a", "--max-tokens", "2").status == 0


def test_more_masks_than_there_are(pipedec: Pipedec, pair: Pair) -> None:
    """Only the cluster that is started for it knows."""
    ended = pipedec(
        "generate", *pair.flags, "--bita", pair.bita, "--method", "bita", "--stages", "1", "--prompt", "a", "--depth", "9"
    )
    assert ended.refused() == "depth 9, but this BiTA was trained with 3 masks: lower --depth"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [("word " * CONTEXT, 1, f"but the model's context is {CONTEXT}"), ("word", CONTEXT, f"asks for {CONTEXT} more")],
)
def test_more_than_the_context(prompt: str, max_tokens: int, message: str, pipedec: Pipedec, pair: Pair) -> None:
    ended = pipedec("generate", *pair.flags, "--stages", "1", "--prompt", prompt, "--max-tokens", str(max_tokens))
    assert message in ended.refused()


def test_a_prompt_longer_than_the_context_for_a_running_cluster(known_resident: LocalCluster, pipedec: Pipedec) -> None:
    ended = pipedec("submit", "--prompt-file", "/dev/stdin", stdin=b"")
    assert ended.status != 0
    assert "the model's context is" in pipedec("submit", stdin=b"word " * CONTEXT).refused()
    assert pipedec("submit", "--prompt", "Hello", "--max-tokens", "1").status == 0


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", [["submit", "--prompt", "a"], ["status"], ["down"]])
@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ([], 2, "no cluster is running here: start one with `pipedec up` or `pipedec launch`, or give --redis URL --run NAME"),
        (["--run", "other"], 2, "no cluster is running here"),
        (["--redis", "redis://:secret@127.0.0.1:PORT"], 1, "cannot reach Redis at 127.0.0.1:PORT: the connection failed"),
        (["--redis", "127.0.0.1:6379"], 2, "--redis: must look like redis://host:6379/0"),
    ],
)
def test_no_cluster_there(command: list[str], flags: list[str], status: int, message: str, pipedec: Pipedec) -> None:
    port = str(closed_port())
    ended = pipedec(*command, *(flag.replace("PORT", port) for flag in flags))
    line = ended.refused(status)
    assert message.replace("PORT", port) in line and "secret" not in line


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server() -> Any:
    with EmbeddedServer() as running:
        yield running


@pytest.mark.parametrize("command", [["submit", "--prompt", "a"], ["status"], ["down"], ["up", "--stages", "1"]])
@pytest.mark.failure_case("R2")
def test_redis_that_refuses_the_password(command: list[str], server: EmbeddedServer, pair: Pair, pipedec: Pipedec) -> None:
    flags = pair.flags if command[0] == "up" else []
    ended = pipedec(*command, *flags, "--redis", f"redis://:guess@{server.address}/0")
    assert ended.refused(1) == f"wrong Redis password for {server.address}"
    with connect(server.url) as client:
        assert client.keys("*") == []


@pytest.mark.parametrize("command", [["submit", "--prompt", "a"], ["status"], ["down"]])
def test_a_run_that_is_not_there(command: list[str], server: EmbeddedServer, pipedec: Pipedec) -> None:
    ended = pipedec(*command, "--redis", server.url, "--run", "nobody")
    assert "no cluster named 'nobody' is running on that Redis" in ended.refused()


@pytest.mark.failure_case("R1")
def test_up_without_a_reachable_redis(pair: Pair, pipedec: Pipedec, state_directory: Path) -> None:
    ended = pipedec("up", *pair.flags, "--stages", "1", "--redis", f"redis://127.0.0.1:{closed_port()}")
    assert "cannot reach Redis" in ended.refused(1)
    assert list(state_directory.iterdir()) == []


def test_up_while_a_cluster_is_running(known_resident: LocalCluster, pair: Pair, pipedec: Pipedec) -> None:
    assert "a cluster is already running here" in pipedec("up", *pair.flags).refused()


def test_a_process_that_got_a_dead_supervisors_number_is_no_cluster(pipedec: Pipedec, state_directory: Path) -> None:
    """As after a reboot: the state file is still there, and its process number belongs to somebody else."""
    began = process_start(os.getpid())
    assert began is not None
    state = RunningCluster("redis://127.0.0.1:1/0", "old", os.getpid(), began)
    state.save()
    assert "cannot reach Redis" in pipedec("status").refused(1)
    RunningCluster("redis://127.0.0.1:1/0", "old", os.getpid(), began - 1).save()
    assert "no cluster is running here" in pipedec("status").refused()


def test_a_damaged_state_file(pipedec: Pipedec, state_directory: Path) -> None:
    (state_directory / "cluster.json").write_text("{")
    assert "cluster.json is damaged: remove it" in pipedec("status").refused(1)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.failure_case("M6")
def test_plan_names_the_unknown_key_and_exits_1_for_what_does_not_fit(pipedec: Pipedec, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    servers = "servers: [{host: a, devices: {rtx3090: 2}}]\npartitions: {only: {stages: 2}}\n"
    file.write_text("target: llama-3.1-70b\ncolour: red\n" + servers)
    assert "colour" in pipedec("plan", file).refused()
    file.write_text("target: llama-3.1-70b\n" + servers)
    ended = pipedec("plan", file)
    assert ended.status == 1 and "pipedec: it does not fit: " in ended.err and "stage" in ended.out
    file.write_text("target: llama-3.2-1b\n" + servers)
    assert pipedec("plan", file).status == 0
    assert "no such file" in pipedec("plan", tmp_path / "missing.yaml").refused()
    assert "other" in pipedec("plan", file, "--partition", "other").refused()


@pytest.mark.usefixtures("nothing_starts")
def test_the_program_itself(pipedec: Pipedec) -> None:
    helped = pipedec("--help")
    assert helped.status == 0 and "submit" in helped.out
    assert pipedec("--version").out.startswith("pipedec")
    assert "No such command 'flush'" in pipedec("flush").refused()
