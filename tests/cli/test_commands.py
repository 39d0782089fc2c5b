"""The commands as a user runs them: answers, JSON, traces, Ctrl-C, and the life of a resident cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.processes import MARK, marked_processes, wait_until
from support.programs import Calls, Started, Terminal
from support.run_stats import described_ranks
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.cli.main import MOVED
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.logs import log_directory
from pipedec.cluster.state import RunningCluster, running_here
from pipedec.core.errors import PipedecError
from pipedec.engine.build import load_drafter
from pipedec.engine.devices import chosen_device
from pipedec.messages.run import LinkSpeed, RunDescription
from pipedec.messages.stats import StageStats
from pipedec.methods import METHOD_NAMES
from pipedec.plan.spec import DISPATCHES
from pipedec.scheduler import RankScheduler, connect
from pipedec.topology import Topology
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PROMPT = "Natalia sold 12 clips in April."
ASKED = ("--raw-prompt", "--prompt", PROMPT, "--ignore-eos", "--max-tokens")
SHORT, LONG = (*ASKED, "16"), (*ASKED, "2000")
START_SECONDS = 120.0


def first_bytes(process: subprocess.Popen[bytes]) -> bytes:
    """Waits for the beginning of the answer."""
    assert process.stdout is not None and process.stderr is not None
    text = process.stdout.read(1)
    assert text, process.stderr.read().decode()
    return text


def ended(process: subprocess.Popen[bytes], seconds: float = 15.0) -> tuple[int, str]:
    """Exit status and what is left on standard error, without a traceback in it."""
    _, err = process.communicate(timeout=seconds)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, err.decode()


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C: the terminal tells the whole process group."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.fixture
def expected(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return reference.generate(tokenizer(PROMPT)["input_ids"], 16, ignore_eos=True)


def test_generate_prints_the_answer_and_its_figures(
    pipedec: Calls, pair: Pair, expected: list[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    flags = "--stages", "2", "--raw-prompt", "--max-tokens", "16", "--ignore-eos"
    answered = pipedec("generate", *pair.flags, *flags, "--no-priors", stdin=PROMPT.encode())  # or it may not speculate at all
    assert answered.status == 0
    assert answered.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    for figure in (
        "pipedec-bestfirst, 2 stages",
        "TTFT",
        "TPOT",
        "acceptance rate",
        "timesteps per token",
        "hit rate",
        "16 (length)",
    ):
        assert figure in answered.err


@pytest.mark.parametrize("resident", DISPATCHES, indirect=True)
def test_submit_prints_one_json_document_and_writes_a_trace(
    pipedec: Calls, known_resident: LocalCluster, expected: list[int], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    answered = pipedec("submit", *SHORT, "--json", "--trace", trace)
    assert answered.status == 0
    document = json.loads(answered.out)
    assert document["token_ids"] == expected and document["stages"] == 2 and document["finish_reason"] == "length"
    # Best-first may let a row and its child enter together, and then two tokens are accepted in one timestep.
    assert 2 * document["misses"] <= document["timesteps"] <= document["hits"] + 2 * document["misses"]
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"scheduler", "rank 0: draft", "rank 1: stage 1", "rank 2: stage 2"}
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}
    windows = known_resident.spec.settings.cluster.dispatch == "windows"  # they count the two timesteps of the prompt, too
    prefill, last = ({"1F1", "2F1"}, document["timesteps"] + 2) if windows else ({"1P0", "2F2"}, document["timesteps"])
    assert {*prefill, "1>2@1", f"0S{last}"} <= {event["name"] for event in events}

    plain = pipedec("submit", *SHORT, "--method", "pp", "--json")
    assert json.loads(plain.out)["token_ids"] == expected and json.loads(plain.out)["hit_rate"] == 0
    static = json.loads(pipedec("submit", *SHORT, "--method", "stpp", "--depth", "2", "--rows", "5", "--json").out)
    assert static["token_ids"] == expected and static["timesteps"] == 3 * static["misses"]
    for shape in ("efficient", "full"):
        masked = json.loads(pipedec("submit", *SHORT, "--method", "bita", "--children", "2", "--shape", shape, "--json").out)
        assert masked["token_ids"] == expected and masked["timesteps"] == 2 * masked["misses"]
        assert masked["hits"] + masked["misses"] == 15
    status = pipedec("status").err
    assert re.search(r"2 │ stage 2 \(group 2\) │ yes", status)
    assert re.search(r"Now: rank 0 [\w ]+, \d+\.\d s; rank 1 ", status)


def test_the_status_shows_how_fast_links_between_hosts_are(pipedec: Calls, known_resident: LocalCluster) -> None:
    assert "Links:" not in pipedec("status").err
    redis_url = known_resident.address.redis_url
    scheduler = RankScheduler(connect(redis_url), "apart", Topology.even(2, 2))
    ranks = described_ranks([LinkSpeed(0.0401, 12.25e6), LinkSpeed(0.00005, 4e8), None])
    scheduler.open(RunDescription(known_resident.spec.settings, scheduler.topology.groups, ((0, 1), (1, 2)), ranks=ranks))
    try:
        shown = pipedec("status", "--redis", redis_url, "--run", "apart").err
    finally:
        scheduler.clear()
    links = ("rank 0 to rank 1: 40.1 ms, at least 98 Mbit/s", "rank 1 to rank 2: 0.05 ms, at least 3,200 Mbit/s")
    assert f"Links: {'; '.join(links)}.\n" in shown


def test_the_status_shows_how_many_experts_a_timestep_reads(pipedec: Calls, known_resident: LocalCluster) -> None:
    assert "Experts:" not in pipedec("status").err
    redis_url = known_resident.address.redis_url
    scheduler = RankScheduler(connect(redis_url), "mixture", Topology.even(2, 2))
    scheduler.open(RunDescription(known_resident.spec.settings, scheduler.topology.groups, ((0, 1), (1, 2))))
    try:
        for rank, experts in ((1, 100), (2, 132)):
            scheduler.publish_stats(StageStats(rank, 10, 20, 0, 1.0, 1.0, experts, expert_layers=10, num_experts=64))
            scheduler.renew_lease(rank)
        shown = pipedec("status", "--redis", redis_url, "--run", "mixture").err
    finally:
        scheduler.clear()
    assert "Experts: 11.6 of 64 per timestep and layer.\n" in shown


def test_submit_answers_several_prompts_together(
    pipedec: Calls, known_resident: LocalCluster, expected: list[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """The answers are in the order of the prompts; one that is refused does not lose the others."""
    asked = ("submit", *SHORT, "--priority", "2")
    answered = pipedec(*asked, "--prompt", "Hello", "--prompt", PROMPT, "--json")
    documents = [json.loads(line) for line in answered.out.splitlines()]
    assert answered.status == 0 and [document["prompt"] for document in documents] == [0, 1, 2]
    assert documents[0]["token_ids"] == documents[2]["token_ids"] == expected
    assert documents[0]["ttft_seconds"] <= documents[0]["e2e_seconds"]
    refused = pipedec(*asked, "--prompt", "word " * 5000)
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert refused.status == 2 and refused.out.startswith(text)
    assert "1 of 2 prompts were not answered: prompt 1: the prompt has" in refused.err.splitlines()[-1]


def test_generate_by_bita_gives_rank_0_no_draft(
    pipedec: Calls, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither one that is named, and is not looked at, nor the shipped one."""
    specs = []

    def start(cluster: LocalCluster, progress: object = None) -> None:
        specs.append(cluster.spec)
        raise PipedecError("enough seen")

    monkeypatch.setattr(LocalCluster, "start", start)
    named = ("--target", pair.target, "--draft", tmp_path / "nowhere", "--bita", pair.bita, "--method", "bita")
    for flags in (named, ("--method", "bita"), ("--method", "pipedec")):
        assert pipedec("generate", "--prompt", "a", *flags).refused(1) == "enough seen"
    *by_bita, with_draft = specs
    for bita in by_bita:
        assert bita.draft is None and bita.trained_masks > 0
        assert load_drafter(bita, chosen_device(bita.settings.cut.device)) is None
    assert with_draft.draft is not None and with_draft.bita == by_bita[1].bita


def test_verify_compares_all_that_the_pipeline_can_do(pipedec: Calls, pair: Pair) -> None:
    models = ("--target", pair.target, "--draft", pair.draft, "--bita", pair.bita)
    asked = ("--device", "cpu", "--stages", "2", "--raw-prompt", "--prompt", PROMPT, "--max-tokens", "4")
    compared = pipedec("verify", *models, *asked, "--local")
    assert compared.status == 0, compared.err
    assert set(re.findall(r"2 stages in 2 groups, ([\w-]+): 1/1 equal", compared.err)) == set(METHOD_NAMES)


def test_ctrl_c_ends_generate_with_all_it_started(started: Started, pair: Pair) -> None:
    process = started("generate", *pair.flags, "--stages", "2", *LONG)
    assert wait_until(lambda: len(others_than(process)) >= 2, START_SECONDS)  # Redis, and the ancestor of the ranks
    interrupt(process)
    status, err = ended(process)
    assert status == 130 and err.splitlines()[-1] == "pipedec: interrupted"


def others_than(process: subprocess.Popen[bytes]) -> set[int]:
    """Everything the program has started."""
    if process.poll() is not None:
        return set()
    return {child.pid for child in psutil.Process(process.pid).children(recursive=True)}


def test_ctrl_c_cancels_what_was_submitted_and_the_cluster_goes_on(
    started: Started, pipedec: Calls, known_resident: LocalCluster, expected: list[int]
) -> None:
    process = started("submit", *LONG)
    first_bytes(process)
    interrupt(process)
    status, err = ended(process)
    assert status == 130 and err.strip() == "pipedec: interrupted"
    answered = pipedec("submit", *SHORT, "--json")
    assert json.loads(answered.out)["token_ids"] == expected


def test_a_reader_that_closes_the_pipe_ends_its_request(started: Started, known_resident: LocalCluster) -> None:
    process = started("submit", *LONG)
    first_bytes(process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(15) != 0
    assert b"Traceback" not in process.stderr.read()
    assert wait_until(lambda: not known_resident.scheduler.status().running, 5)  # type: ignore[union-attr]


def bring_up(started: Started, *flags: str, background: bool = False) -> tuple[subprocess.Popen[bytes], RunningCluster]:
    process = started("up", *flags, background=background)
    assert wait_until(lambda: process.poll() is not None or running_here(), START_SECONDS)
    (state,) = running_here()
    assert state.pid == process.pid, process.stderr and process.stderr.read().decode()
    return process, state


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_a_supervisor_killed_at_once_leaves_no_rank_and_no_redis(started: Started, pipedec: Calls, pair: Pair) -> None:
    process, _ = bring_up(started, *pair.flags, "--stages", "2")
    others = others_than(process)
    assert len(others) >= 4  # Redis and three ranks
    process.kill()
    assert wait_until(lambda: not others & marked_processes(), 10)
    assert "no cluster is running here" in pipedec("status").refused()
    assert "no cluster is running here" in pipedec("down").refused()


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_sigterm_ends_a_resident_cluster_in_order(started: Started, pair: Pair, state_directory: Path) -> None:
    """Also one that is deaf to Ctrl-C, as a shell's background jobs are."""
    process, state = bring_up(started, *pair.flags, "--stages", "1", background=True)
    (file,) = state_directory.glob("cluster-*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    password = state.redis_url.partition("redis://:")[2].partition("@")[0]
    for pid in {process.pid} | others_than(process):
        assert password not in Path(f"/proc/{pid}/cmdline").read_text()
    interrupt(process)
    process.terminate()
    status, err = ended(process)
    assert status == 0 and "Stopping the cluster." in err and password not in err
    assert not file.exists()


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("M14")
def test_a_resident_cluster_that_replaces_no_rank_ends_with_an_error(
    started: Started, pipedec: Calls, pair: Pair, state_directory: Path
) -> None:
    process, _ = bring_up(started, *pair.flags, "--stages", "2", "--max-restarts", "0")
    asking = started("submit", *LONG)
    first_bytes(asking)
    os.kill(ranks_of(process)[2], signal.SIGKILL)
    status, err = ended(process)
    assert status == 1 and err.splitlines()[-1] == "pipedec: rank 2 (stage 2) was killed by SIGKILL"
    assert running_here() == []
    status, err = ended(asking)
    assert status == 1 and "rank 2" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_a_resident_cluster_replaces_a_rank_and_says_so(
    started: Started, pipedec: Calls, pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    process, cluster = bring_up(started, *pair.flags, "--stages", "2")
    status_of = cluster.connect().status
    asking = started("submit", *ASKED, "800", "--json")
    assert wait_until(lambda: 0 in status_of().running, START_SECONDS), pipedec("status")
    os.kill(ranks_of(process)[2], signal.SIGKILL)
    assert asking.stdout is not None and asking.wait(60) == 0
    answer = json.loads(asking.stdout.read())
    assert answer["token_ids"] == reference.generate(tokenizer(PROMPT)["input_ids"], 800, ignore_eos=True)
    shown = pipedec("status").err
    assert "epoch 1" in shown and "Recoveries: 1, the last ones:" in shown
    said = re.compile(r"Epoch 1: rank 2 \(stage 2\) was killed by SIGKILL; went on after \d+\.\d s\.")
    assert said.search(shown)
    interrupt(process)
    status, err = ended(process)
    assert status == 0 and said.search(err)


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the ranks, in their order: they are forked one after the other by the program's fork server."""
    server = next(child for child in psutil.Process(process.pid).children() if "forkserver" in " ".join(child.cmdline()))
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    return sorted((child.pid for child in server.children()), key=lambda pid: (pid - server.pid) % limit)


def test_up_status_submit_down(
    started: Started, terminal: Callable[..., Terminal], pipedec: Calls, pair: Pair, expected: list[int], state_directory: Path
) -> None:
    """``pipedec top`` shows the answer, and ends with the run."""
    starter = started("up", "--detach", *pair.flags, "--stages", "1")
    status, err = ended(starter, START_SECONDS)
    assert status == 0 and "is up (process " in err, err
    (state,) = running_here()
    assert MARK.encode() in Path(f"/proc/{state.pid}/environ").read_bytes()
    top = terminal("top", TERM="xterm-256color", COLUMNS="100", LINES="30")
    top.until("0 running", "2 of 2 ranks alive")

    assert "is already running here" in pipedec("up", *pair.flags, "--run", state.run_id).refused()
    answer = json.loads(pipedec("submit", *SHORT, "--json").out)
    assert answer["token_ids"] == expected
    assert wait_until(lambda: "Requests: 1 submitted, 0 waiting, running: none." in pipedec("status").err)

    down = pipedec("down")
    assert down.status == 0 and down.err == f"Cluster {state.run_id} is down.\n"
    assert not state.is_alive() and running_here() == []
    assert (log_directory(state.run_id) / "cluster.log").read_text().strip().endswith("Cluster stopped.")
    top.until(f"The run {state.run_id} has ended")
    assert top.ended() == 0


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("M26")
def test_two_clusters_started_at_once_both_come_up(started: Started, pipedec: Calls, pair: Pair) -> None:
    both = [started("up", "--detach", *pair.flags, "--stages", "1") for _ in range(2)]
    assert [ended(process, START_SECONDS)[0] for process in both] == [0, 0]
    first, second = running_here()
    assert "2 clusters are running here: choose one, --run" in pipedec("submit", *SHORT).refused()
    for state in (first, second):
        assert json.loads(pipedec("submit", "--run", state.run_id, *SHORT, "--json").out)["text"]
    assert pipedec("down", "--run", first.run_id).status == 0
    assert running_here() == [second]
    assert pipedec("down").status == 0 and running_here() == []


def test_without_pandas_one_line_says_what_to_install(pipedec: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for module in ("pipedec.bench.report.frames", "pipedec.cli.benchmarks.plot"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    line = pipedec("bench", "plot", tmp_path, "--out", tmp_path / "figures").refused()
    assert line == "this command needs pandas: pip install 'pipedec[bench]'"


def test_a_command_that_has_moved_says_where_it_is(pipedec: Calls) -> None:
    for name, place in MOVED.items():
        group, command = name.split()
        for rest in ([], ["--prompt", "Who?", "--help"]):
            assert pipedec(group, command, *rest).refused() == f"pipedec {name} {place}"
        assert f"\n  {command} " not in pipedec(group, "--help").out
