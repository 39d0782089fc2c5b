"""What a partition needs of each host, from the plan of the paper's cluster and of small ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from support.checkpoints import save_tiny_llama
from support.clusters import clustered

from pipedec.checkpoints import LayerSpan
from pipedec.cluster.doctor.facts import Questions
from pipedec.cluster.doctor.needs import PROCESS_BYTES, HostNeeds, host_needs
from pipedec.cluster.survey import planned_needs, questions_for
from pipedec.config import ServerConfig, paper_cluster
from pipedec.families import KNOWN_MODELS
from pipedec.plan.partition import plan
from pipedec.validation import validated

SHAPE = KNOWN_MODELS["llama-3.1-8b"]
SERVERS = [ServerConfig("a", {"rtx3090": 2}), ServerConfig("b", {"rtx3090": 1, "cpu": 2}), ServerConfig("c", {"rtx3090": 1})]
ON_A_AND_B = {
    "stages": 3, "layers": [11, 11, 10],
    "devices": [{"host": "a", "device": "rtx3090", "count": 2}, {"host": "b", "device": "rtx3090"}],
    "draft_device": {"host": "b", "device": "cpu"},
}  # fmt: skip
MODELS = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "dtype": "bfloat16", "draft_dtype": "bfloat16"}


def needs(**keys: Any) -> dict[str, HostNeeds]:
    config = clustered(SERVERS, {"p": ON_A_AND_B}, **{**MODELS, **keys})
    return host_needs(config, plan(config))


def test_every_gpu_needs_what_its_ranks_take() -> None:
    config = paper_cluster()
    made = plan(config, "paper-14")
    found = host_needs(config, made)
    assert list(found) == ["server-4", "server-1", "server-2"]
    assert [(need.index, need.ranks) for need in found["server-1"].gpus] == [(index, (index + 1,)) for index in range(7)]
    by_rank = {rank: need for host in found.values() for need in host.gpus for rank in need.ranks}
    for rank in made.stages:
        assert rank.weight_bytes + rank.workspace_bytes < by_rank[rank.rank].least_bytes <= by_rank[rank.rank].planned_bytes
        assert by_rank[rank.rank].planned_bytes <= rank.memory_bytes
    links = {host: its.targets for host, its in found.items()}
    assert links == {"server-4": ("server-1",), "server-1": ("server-2",), "server-2": ("server-4",)}


def test_ranks_that_share_a_gpu_need_their_sum() -> None:
    config = clustered(SERVERS, {"p": ON_A_AND_B}, **MODELS)
    made = plan(config)
    assert made.draft is not None
    shared = replace(made, draft=replace(made.draft, placement=made.stages[2].placement))
    (alone,), (together,) = host_needs(config, made)["b"].gpus, host_needs(config, shared)["b"].gpus
    assert (alone.ranks, together.ranks) == ((3,), (0, 3))
    assert together.least_bytes > alone.least_bytes + made.draft.weight_bytes + made.draft.workspace_bytes


def test_a_given_kv_memory_is_needed_in_full() -> None:
    free, given = needs()["a"].gpus[0], needs(kv_cache_memory="3GiB")["a"].gpus[0]
    assert given.least_bytes == given.planned_bytes
    assert given.least_bytes - free.least_bytes > 2 << 30


def test_loading_takes_processes_the_largest_tensor_and_weights_on_the_processor() -> None:
    found = needs()
    assert found["a"].memory_bytes == 2 * (PROCESS_BYTES + 2 * SHAPE.embedding_parameters)
    draft = 2 * KNOWN_MODELS["llama-3.2-1b"].parameters
    assert found["b"].memory_bytes > found["a"].memory_bytes / 2 + draft
    stage = 2 * (10 * SHAPE.layer_parameters + SHAPE.embedding_parameters)
    assert found["b"].checkpoint_bytes == stage + draft


def test_hosts_read_parts_and_spares_may_read_all(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "target", layers=4)
    save_tiny_llama(tmp_path / "draft", layers=2)
    partition = {**ON_A_AND_B, "layers": [1, 2, 1]}
    models = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    config = clustered(SERVERS, {"p": partition}, **models, spares=[{"host": "c", "device": "rtx3090"}])
    found = host_needs(config, plan(config))
    parts = {host: {now.key: (now, later) for now, later in its.parts()} for host, its in found.items()}
    first, second, third = (
        LayerSpan(range(0, 1), True, False),
        LayerSpan(range(1, 3), False, False),
        LayerSpan(range(3, 4), False, True),
    )
    spans = {host: (its["target"][0].spans, its["draft"][0].is_whole) for host, its in parts.items()}
    assert spans == {"b": ((third,), True), "a": ((first, second), False), "c": ((), False)}
    may_read = {host: [later.is_whole for _, later in its.values()] for host, its in parts.items()}
    assert may_read["c"] == [True, True] and may_read["a"] == [False, False]
    assert [host for host, its in found.items() if its.ranks] == ["b", "a"] and found["c"].gpus == ()
    assert {now.model for now, _ in parts["a"].values()} == {str(model) for model in models.values()}
    questions = questions_for(config, found)["c"]
    assert validated(Questions, asdict(questions)) == questions


def test_ranks_of_one_host_need_no_link() -> None:
    config = clustered(SERVERS, {"p": {"stages": 2, "servers": ["a"]}}, **{**MODELS, "draft": "none"})
    assert host_needs(config, plan(config))["a"].targets == ()


def test_a_plan_that_cannot_be_made_is_a_note_and_one_that_does_not_fit_a_problem() -> None:
    unnamed = clustered(SERVERS, {"p": ON_A_AND_B, "q": ON_A_AND_B}, **MODELS)
    found, finding = planned_needs(unnamed, None)
    assert found == {} and finding is not None and finding.level == "note" and "name a partition: p, q" in finding.value
    assert all(one.needs is None for one in questions_for(unnamed, found).values())
    found, finding = planned_needs(unnamed, "q")
    assert finding is None and questions_for(unnamed, found)["c"].needs is None
    large = clustered(SERVERS, {"p": {**ON_A_AND_B, "layers": "auto"}}, **{**MODELS, "target": "llama-3.1-70b"})
    found, finding = planned_needs(large, None)
    assert found and finding is not None and finding.level == "problem" and "pipedec plan" in str(finding.mend)
