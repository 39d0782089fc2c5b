"""Pairs of devices, tried by real processes: over gloo, as there may be no GPUs; what does not work is named with its mend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

import pytest
from support.clusters import clustered

from pipedec.cluster import survey
from pipedec.cluster.doctor import host as on_host
from pipedec.cluster.doctor.comparison import HostAnswer, compare
from pipedec.cluster.doctor.gpus import Gpu
from pipedec.cluster.doctor.host import HostDoctor, HostReport, Questions
from pipedec.cluster.doctor.needs import host_needs
from pipedec.cluster.doctor.pairs import GpuPair, PairEnd, pair_findings, try_ends, try_near
from pipedec.cluster.survey import Survey
from pipedec.config import ServerConfig, paper_cluster
from pipedec.plan.partition import plan
from pipedec.transport.rendezvous import StoreServer, part_of_store

ADDRESS = "127.0.0.1"
pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_two_processes_exchange_a_message() -> None:
    assert try_near(["cpu", "cpu"], 60) is None


def test_a_peer_that_comes_and_does_not_answer_is_given_up_in_time() -> None:
    server = StoreServer(ADDRESS)
    part_of_store(server.store, 1).set("end 0", "is here")
    assert try_ends([PairEnd(1, "cpu", ADDRESS, server.port, 1, "lo", 0.5)]) == "nothing has arrived within 0.5 s"


def test_a_process_that_fails_is_named_and_the_other_one_ended() -> None:
    """Without waiting for what it waits for."""
    reason = try_near(["cpu", "cuda:77"], 60)
    assert reason is not None and "within" not in reason and len(reason.splitlines()) == 1


def test_two_hosts_try_the_pair_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "own_address", lambda questions: ADDRESS)
    first, second = HostDoctor(), HostDoctor()
    port = first.examine(Questions(peers=("beta",), starts_redis=False)).port
    assert port is not None
    second.examine(Questions(starts_redis=False))
    with ThreadPoolExecutor(2) as both:
        ends = [both.submit(one.try_pair, ["cpu"], rank, ADDRESS, port, 1) for rank, one in enumerate((first, second))]
        assert [end.result() for end in ends] == [None, None]


def test_what_does_not_work_has_its_mend() -> None:
    near, far, reason = GpuPair(0, 1), GpuPair(1, 0, "beta"), "nothing has arrived within 20 s"
    assert (near.name, far.name) == ("GPU 0 → GPU 1", "GPU 1 → beta GPU 0") and pair_findings({}) == []
    (well,) = pair_findings({near: None, far: None})
    assert (well.level, well.value) == ("ok", "GPU 0 → GPU 1, GPU 1 → beta GPU 0 exchange messages")
    for broken, words, others in (
        (near, "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1", "NCCL_IB_DISABLE"),
        (far, "NCCL_SOCKET_IFNAME NCCL_IB_DISABLE=1", "NCCL_P2P_DISABLE"),
    ):
        (found,) = pair_findings({near: None, far: None, broken: reason})
        assert (found.level, found.value) == ("problem", f"{broken.name}: {reason}") and found.mend is not None
        assert all(word in found.mend for word in [*words.split(), "transport: gloo"]) and others not in found.mend


def test_stages_that_follow_each_other_are_tried_and_one_pair_of_two_hosts() -> None:
    config = paper_cluster()
    needs = host_needs(config, plan(config, "paper-14"))
    near = [GpuPair(index, index + 1) for index in range(6)]
    assert needs["server-1"].pairs == (*near, GpuPair(6, 0, "server-2")) and len(needs["server-2"].pairs) == 6
    assert needs["server-4"].pairs == (), "rank 0 uses gloo"


class Link:
    """Stands for a node that answers at once: of its pairs, those of which it is the second end do not work."""

    def __init__(self, server: ServerConfig, launch: Any, news: SimpleQueue[Any]) -> None:
        self._host, self._news = server.host, news

    def order(self, name: str, **contents: Any) -> None:
        gpus = (Gpu("NVIDIA GeForce RTX 3090", 25_300_000_000),) * 2
        report = HostReport((), "python", {}, gpus, ADDRESS, 1, "", False, {}, 0)
        answers: dict[str, dict[str, Any]] = {
            "examine": {"news": "examined", "report": asdict(report)},
            "reach": {"news": "reached", "unreachable": {}},
            "measure": {"news": "measured", "link": "no measurement"},
            "try pair": {"news": "tried", "reason": "no route" if contents.get("rank") else None},
        }
        self._news.put((self._host, answers[name]))


def test_a_partition_tries_its_pairs_within_a_host_and_between_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "NodeLink", Link)
    monkeypatch.setattr(survey, "end_links", lambda *ignored: None)
    partition = {"stages": 4, "layers": [8, 8, 8, 8]}
    models = {"target": "llama-3.1-8b", "draft": "none", "dtype": "bfloat16"}
    for transport, pairs in (
        ("auto", [{GpuPair(0, 1): None, GpuPair(1, 0, "beta"): "no route"}, {GpuPair(0, 1): None}]),
        ("gloo", [{}, {}]),
    ):
        servers = [ServerConfig(host, {"rtx3090": 2}) for host in ("alpha", "beta")]
        config = clustered(servers, {"p": partition}, **models, transport=transport)
        with Survey(config, "p") as found:
            answers = found.answers()
        assert [answer.pairs for answer in answers.values() if isinstance(answer, HostAnswer)] == pairs
        rows = [findings.get("GPU pairs") for findings in compare(config, answers).values()]
        assert [row and row.level for row in rows] == (["problem", "ok"] if transport == "auto" else [None, None])
