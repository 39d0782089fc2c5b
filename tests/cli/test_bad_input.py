"""The user's mistakes through the real program: one clear line, a non-zero exit, nothing left running."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from support.programs import Calls
from support.tiny_pair import CONTEXT, TARGET_LAYERS, Pair

from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster, process_start
from pipedec.core.errors import UserError
from pipedec.scheduler import EmbeddedRedis, connect

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def no_process(arguments: Sequence[str], *others: Any, **keywords: Any) -> Any:
    """Of all programs only the one that checks structures may be started."""
    assert "pipedec.grammar.apart" in arguments, "a rank or a Redis was started before the mistake was found"
    return Popen(arguments, *others, **keywords)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes that need no cluster to be found must be found before there is one."""
    monkeypatch.setattr("subprocess.Popen", no_process)
    monkeypatch.setattr("pipedec.cluster.processes.RankProcesses.start", no_process)


REFUSED = [
    (["--prompt", ""], "the prompt is empty"),
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
    (["--prompt", "a", "--json-schema", "missing.json"], "cannot read missing.json"),
    (["--prompt", "a", "--grammar", "missing.lark"], "cannot read missing.lark"),
    (["--prompt", "a", "--regex", "a", "--ignore-eos"], "ignore_eos"),
    (["--prompt", "a", "--regex", "a", "--threads", "apar"], "threads"),
    (["--prompt", "a", "--max-tokens", "0"], "max_tokens: must be an integer (at least 1), not 0"),
    (["--prompt", "a", "--temperature", "-1"], "temperature: must be a number (at least 0), not -1.0"),
    (["--prompt", "a", "--stop", ""], "stop[0]: must be a string (not empty), not ''"),
    (["--prompt", "a", "--logit-bias", "five"], "--logit-bias five: write TOKEN_ID=VALUE, like 42=-5"),
    (["--prompt", "a", "--logprobs", "21"], "logprobs: must be an integer (0 to 20), not 21"),
    (["--prompt", "a", "--width", "0"], "Invalid value for '--width': must be an integer (1 to 512), not 0"),
    (
        ["--prompt", "a", "--method", "magic"],
        "Invalid value for '--method': must be one of pp, stpp, pipedec,",
    ),
    (["--prompt", "a", "--trace", "nowhere/trace.json"], "--trace nowhere/trace.json: there is no directory nowhere"),
    (["--prompt", "a", "--trace", "."], "--trace .: cannot write there"),
    (["--prompt", "a", "--stages", str(TARGET_LAYERS + 1)], f"9 stages, but the target has {TARGET_LAYERS} layers"),
    (["--prompt", "a", "--stages", "2", "--groups", "3"], "groups: 3 groups need at least as many stages, but there are 2"),
    (["--prompt", "a", "--stages", "2", "--layers", "4,5"], "layers sum to 9, the target has 8"),
    (["--prompt", "a", "--draft", "none", "--method", "stpp"], "method stpp needs a draft model"),
    (["--prompt", "a", "--draft", "nowhere"], "nowhere is not a directory"),
    (["--prompt", "a", "--target", "nowhere"], "nowhere is not a directory"),
    (["--prompt", "a", "--bita", "nowhere"], "nowhere/config.json cannot be read: give a directory that pipedec train bita"),
    (["--prompt", "a", "--method", "bita", "--bita", "none"], "method bita needs what pipedec train bita has learned"),
    (
        ["--prompt", "a", "--shape", "nonsense"],
        "Invalid value for '--shape': must be one of likeliest, efficient,",
    ),
    (
        ["--prompt", "a", "--proposers", "oracle"],
        "Invalid value for '--proposers': [0]: must be one of draft, ngrams, not 'oracle'",
    ),
    (["--prompt", "a", "--depth", "4"], "method pipedec-bestfirst has no option 'depth': it is an option of stpp, bita"),
    (["--prompt", "a", "--kv-cache-memory", "1KB"], "but a few hundred tokens need 64.0 KiB: give a larger --kv-cache-mem"),
    (["--prompt", "a", "--colour", "red"], "No such option '--colour'"),
]


@pytest.mark.usefixtures("nothing_starts")
def test_generate_refuses(pipedec: Calls, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in REFUSED:
        assert message in pipedec("generate", *pair.flags, *arguments).refused(), arguments
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert pipedec("generate", *pair.flags, "--prompt-file", "prompt.txt").refused() == "prompt.txt is not UTF-8 text"
    assert pipedec("generate", *pair.flags, stdin=b"caf\xe9").refused() == "standard input is not UTF-8 text"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.usefixtures("nothing_starts")
def test_rounded_activations_are_not_verified(pipedec: Calls, pair: Pair) -> None:
    refused = pipedec("verify", *pair.flags, "--prompt", "a", "--wire-dtype", "int8").refused()
    assert refused == "--wire-dtype int8 may change tokens, so there is nothing to verify: leave it out"


def test_a_gpu_that_is_not_there(pipedec: Calls, pair: Pair) -> None:
    assert pipedec("generate", *pair.flags, "--prompt", "a", "--device", "cuda").refused() == (
        "--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu"
    )


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.failure_case("M4")
def test_models_that_do_not_belong_together(pipedec: Calls, pair: Pair) -> None:
    ended = pipedec("generate", "--prompt", "a", "--target", pair.target, "--draft", pair.foreign_draft)
    assert "has a different tokenizer than the target" in ended.refused()
    assert "give --draft DIR beside --target" in pipedec("generate", "--prompt", "a", "--target", pair.target).refused()
    assert "nowhere is not a directory" in pipedec("generate", "--prompt", "a", "--target", "nowhere").refused()


def rewrite(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.usefixtures("nothing_starts")
def test_a_damaged_checkpoint(pipedec: Calls, pair: Pair, tmp_path: Path) -> None:
    for damaged, name, damage, message in (
        ("target", "model.safetensors", truncate, "model.safetensors is not a whole safetensors file"),
        (
            "target",
            "model.safetensors",
            lambda path: path.write_bytes(b"<html>not found</html>"),
            "is not a whole safetensors file",
        ),
        ("target", "model.safetensors", Path.unlink, "holds neither model.safetensors nor"),
        ("target", "config.json", Path.unlink, "config.json is missing"),
        ("target", "config.json", lambda path: path.write_text("{"), "config.json: not valid JSON"),
        ("bita", "model.safetensors", truncate, "model.safetensors is not a whole safetensors file"),
        ("bita", "model.safetensors", Path.unlink, "model.safetensors is not a whole safetensors file"),
        ("bita", "config.json", Path.unlink, "config.json cannot be read: give a directory that pipedec train bita"),
        ("bita", "config.json", lambda path: path.write_text("[]"), "config.json is not of format pipedec-bita-1"),
        ("bita", "config.json", lambda path: rewrite(path, '"num_masks": 3', '"num_masks": 3.0'), "config.json is damaged"),
        (
            "bita",
            "config.json",
            lambda path: rewrite(path, '"num_masks": 3', '"num_masks": 4'),
            "tensor masks has shape [3, 32],",
        ),
        ("bita", "config.json", lambda path: rewrite(path, '"target": "', '"target": "f'), "was trained for another target than"),
    ):
        copy = Path(shutil.copytree(getattr(pair, damaged), tmp_path / "copy"))
        damage(copy / name)
        asked = ("generate", *pair.flags, "--prompt", "a", f"--{damaged}", copy, "--method", "pp")
        assert message in pipedec(*asked).refused(), (damaged, name)
        shutil.rmtree(copy)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def test_what_does_not_fit_a_running_cluster(known_resident: LocalCluster, pipedec: Calls) -> None:
    for flags, message in (
        (["--depth", "4"], "depth 4, but this BiTA was trained with 3 masks: lower --depth"),
        (["--children", "129"], "Invalid value for '--children': must be an integer (1 to 128), not 129"),
        (["--children", "20", "--shape", "full"], "a tree of 33684 rows is more than 512: lower --depth or --children"),
        (["--width", "4"], "method bita has no option 'width': it is an option of stpp, pipedec, pipedec-bestfirst"),
    ):
        assert pipedec("submit", "--method", "bita", "--prompt", "a", *flags).refused() == message
    assert pipedec("submit", "--prompt-file", "/dev/stdin", stdin=b"").status != 0
    assert f"but the model's context is {CONTEXT}" in pipedec("submit", stdin=b"word " * CONTEXT).refused()
    assert f"asks for {CONTEXT} more" in pipedec("submit", "--prompt", "word", "--max-tokens", str(CONTEXT)).refused()
    assert pipedec("submit", "--method", "bita", "--prompt", "a", "--max-tokens", "2").status == 0


@pytest.mark.slow
def test_more_masks_than_there_are(pipedec: Calls, pair: Pair) -> None:
    """Only the cluster that is started for it knows."""
    flags = ("--bita", pair.bita, "--method", "bita", "--stages", "1", "--prompt", "a", "--depth", "9")
    ended = pipedec("generate", *pair.flags, *flags)
    assert ended.refused() == "depth 9, but this BiTA was trained with 3 masks: lower --depth"


COMMANDS = (["submit", "--prompt", "a"], ["status"], ["down"])


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ([], 2, "no cluster is running here: start one with `pipedec up` or `pipedec launch`, or give --redis URL --run NAME"),
        (["--run", "other"], 2, "no cluster is running here"),
        (["--redis", "redis://:secret@127.0.0.1:PORT"], 1, "cannot reach Redis at 127.0.0.1:PORT: the connection failed"),
        (["--redis", "127.0.0.1:6379"], 2, "--redis: must look like redis://host:6379/0"),
    ],
)
def test_no_cluster_there(flags: list[str], status: int, message: str, pipedec: Calls) -> None:
    port = str(closed_port())
    for command in COMMANDS:
        line = pipedec(*command, *(flag.replace("PORT", port) for flag in flags)).refused(status)
        assert message.replace("PORT", port) in line and "secret" not in line


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.mark.failure_case("R2")
def test_redis_that_refuses_the_password(server: EmbeddedRedis, pair: Pair, pipedec: Calls) -> None:
    for command in (*COMMANDS, ["up", *pair.flags, "--stages", "1"]):
        ended = pipedec(*command, "--redis", f"redis://:guess@{server.address}/0")
        assert ended.refused(1) == f"wrong Redis password for {server.address}"
    with connect(server.url) as client:
        assert client.keys("*") == []
    for command in COMMANDS:
        line = pipedec(*command, "--redis", server.url, "--run", "nobody").refused()
        assert "no cluster named 'nobody' is running on that Redis" in line


@pytest.mark.failure_case("R1")
def test_up_without_a_reachable_redis(pair: Pair, pipedec: Calls, state_directory: Path) -> None:
    ended = pipedec("up", *pair.flags, "--stages", "1", "--redis", f"redis://127.0.0.1:{closed_port()}")
    assert "cannot reach Redis" in ended.refused(1)
    assert list(state_directory.iterdir()) == []


def test_a_process_that_got_a_dead_supervisors_number_is_no_cluster(pipedec: Calls, state_directory: Path) -> None:
    """As after a reboot: the state file is still there, and its process number belongs to somebody else."""
    began = process_start(os.getpid())
    assert began is not None
    RunningCluster("redis://127.0.0.1:1/0", "new", os.getpid(), began).save()
    assert "cannot reach Redis" in pipedec("status").refused(1)
    (file,) = state_directory.iterdir()
    file.unlink()
    RunningCluster("redis://127.0.0.1:1/0", "old", os.getpid(), began - 1).save()
    assert "no cluster is running here" in pipedec("status").refused()
    assert list(state_directory.iterdir()) == []
    file.write_text("{")
    assert f"{file} is damaged: remove it" in pipedec("status").refused(1)


@pytest.mark.failure_case("M26")
def test_of_several_clusters_one_is_chosen_by_name(
    pipedec: Calls, state_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another host, which has the same home, do not count."""
    began = process_start(os.getpid())
    for run in ("a", "b/c", "d"):
        RunningCluster(f"redis://127.0.0.1:{closed_port()}/0", run, os.getpid(), began).save()
        if run == "a":
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
                assert "no cluster is running here" in pipedec("status").refused()
                RunningCluster("redis://127.0.0.1:1/0", run, 1, 1, outlives_supervisor=True).save()
    listed = f"a (process {os.getpid()}) or b/c (process {os.getpid()}) or d (process {os.getpid()})"
    for command in ("status", "down"):
        assert pipedec(command).refused() == f"3 clusters are running here: choose one, --run {listed}"
        assert pipedec(command, "--run", "e").refused() == f"no cluster named 'e' is running here: give --run {listed}"
        assert "cannot reach Redis" in pipedec(command, "--run", "b/c").refused(1)
    taken = "a cluster named 'b/c' is already running here: stop it with `pipedec down --run b/c`, or give another --run NAME"
    assert pipedec("up", "--run", "b/c").refused() == taken
    with pytest.raises(UserError, match="is already running here"):
        RunningCluster("redis://127.0.0.1:1/0", "b/c", os.getpid(), began).save()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.failure_case("M6")
def test_plan_names_the_unknown_key_and_exits_1_for_what_does_not_fit(pipedec: Calls, tmp_path: Path) -> None:
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
def test_the_program_itself(pipedec: Calls) -> None:
    helped = pipedec("--help")
    assert helped.status == 0 and "submit" in helped.out
    assert pipedec("--version").out.startswith("pipedec")
    assert "No such command 'flush'" in pipedec("flush").refused()
