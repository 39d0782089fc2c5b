"""The log files of a run: what is in them, what never is, and when they are removed."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.logs import MOST_RUNS, log_directory, run_log
from pipedec.config import RedisConfig
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) (rank-\d|watch) epoch \d+ pipedec[\w.]+: .+")
logger = logging.getLogger("pipedec.tests")


@pytest.mark.usefixtures("leaves_nothing")
def test_a_lost_rank_is_in_the_logs_and_no_secret_is(pair: Pair, state_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = PromptRequest(SENTENCES[0], True, "pp", SamplingParams(max_tokens=4, ignore_eos=True))
    run_id = f"logged-{secrets.token_hex(4)}"
    with LocalCluster(pair.spec(2), run_id) as cluster:
        assert cluster.scheduler is not None
        client, scheduler = Client(cluster.scheduler, cluster.check), cluster.scheduler
        text = client.ask(request).text
        os.kill(cluster.pids[1], signal.SIGKILL)
        assert wait_until(lambda: scheduler.status().epoch == 1 and not scheduler.status().is_recovering, 60)
        assert client.ask(request).text == text
        password = RedisConfig(cluster.address.redis_url).password
        theirs = psutil.Process(cluster.pids[0]).environ()
    files = {path.stem: path.read_text() for path in log_directory(run_id).iterdir()}
    for name in ("PIPEDEC_STATE_DIR", "XDG_RUNTIME_DIR", "HOME"):  # ranks have the environment of this process's first cluster
        monkeypatch.setenv(name, theirs[name]) if name in theirs else monkeypatch.delenv(name, raising=False)
    files |= {path.stem: path.read_text() for path in log_directory(run_id).iterdir()}
    shutil.rmtree(log_directory(run_id))
    assert files.keys() == {"rank-0", "rank-1", "rank-2", "watch"}
    lines = [line for file in files.values() for line in file.splitlines()]
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert files["rank-1"].count("started as rank 1 (stage 1) of 3 ranks") == 2
    assert files["rank-2"].count("started as") == 1 and " epoch 1 " in files["rank-2"]
    for rank in range(3):
        assert "over gloo (" in files[f"rank-{rank}"] and "KV slots" in files[f"rank-{rank}"]
    assert "rank 1 (stage 1) was killed by SIGKILL" in files["watch"] and "1 of 5 restarts" in files["watch"]
    assert password and not any(one in "".join(lines) for one in (password, SENTENCES[0], "redis://"))


def test_a_process_of_the_user_logs_losses_of_this_thread_alone(state_directory: Path) -> None:
    before = logging.getLogger("pipedec").level
    with run_log("mine", "watch", "info", lambda: 3, own_process=False):
        logger.info("chosen")
        logger.warning("lost")
    logger.warning("later")
    assert logging.getLogger("pipedec").level == before
    (line,) = (log_directory("mine") / "watch.log").read_text().splitlines()
    assert line.endswith("WARNING watch epoch 3 pipedec.tests: lost")


def test_a_level_leaves_out_what_is_below_it(state_directory: Path) -> None:
    try:
        with run_log("loud", "rank-1", "debug", lambda: 0):
            logger.debug("small")
        with run_log("quiet", "rank-1", "warning", lambda: 0):
            logger.info("chosen")
            logger.warning("lost")
    finally:
        logging.getLogger("pipedec").setLevel(logging.NOTSET)
    assert "DEBUG" in (log_directory("loud") / "rank-1.log").read_text()
    assert (log_directory("quiet") / "rank-1.log").read_text().count("\n") == 1


def test_the_newest_runs_are_kept_and_all_that_are_open(state_directory: Path) -> None:
    with run_log("open", "watch", "info", lambda: 0, own_process=False):
        for number in range(MOST_RUNS + 3):
            with run_log(f"run {number}", "watch", "info", lambda: 0, own_process=False):
                os.utime(log_directory(f"run {number}"), (number, number))
        os.utime(log_directory("open"), (0, 0))
        with run_log("last", "watch", "info", lambda: 0, own_process=False):
            kept = {path.name for path in log_directory("last").parent.iterdir()}
    newest = {f"run%20{number}" for number in range(4, MOST_RUNS + 3)}
    assert kept == {"last", "open"} | newest


def test_without_a_place_for_logs_a_rank_goes_on(state_directory: Path) -> None:
    (state_directory / "logs").write_text("a file where the directory should be")
    with run_log("mine", "rank-1", "info", lambda: 0, own_process=False):
        logger.warning("lost")
