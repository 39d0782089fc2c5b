"""NCCL: one rank by itself, stages that exchange activations, and clusters whose stages have a GPU each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support import peer
from support.peer import Peer
from support.tiny_pair import Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import load_prompter
from pipedec.messages.request import PromptRequest
from pipedec.verify.reference import Reference

PROMPT = "Natalia sold 12 clips in April."
SELF_TEST = """
import sys, torch, torch.distributed as dist
backend, device = sys.argv[1:]
dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
values = torch.arange(1024.0, device=device)
dist.all_reduce(values)
assert values.tolist() == list(range(1024)), values
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_backend_of_a_device_works_for_one_rank(device: str) -> None:
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    done = subprocess.run([sys.executable, "-c", SELF_TEST, backend, device], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


OVER_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # as between hosts


@pytest.mark.parametrize(
    ("devices", "stages", "variables"),
    [
        pytest.param("cpu", 2, {}, id="cpu-2"),
        pytest.param("cpu", 3, {}, id="cpu-3", marks=pytest.mark.slow),
        pytest.param("cuda", 2, {}, id="cuda-2", marks=pytest.mark.gpu(2)),
        pytest.param("cuda", 2, OVER_SOCKETS, id="cuda-2-sockets", marks=pytest.mark.gpu(2)),
        pytest.param("cuda", 3, {}, id="cuda-3", marks=pytest.mark.gpu(3)),
    ],
)
def test_neighbours_exchange_activations_over_groups_of_two(
    devices: str, stages: int, variables: Mapping[str, str], tmp_path: Path
) -> None:
    """As a transport makes them, of two stages each, connected before the first message. A middle stage is in two of them: it
    receives over one and sends over the other.
    """
    dtype, world = torch.bfloat16, stages + 1
    peers = [
        Peer(rank, world, tmp_path / "meeting", dtype, backend="nccl", device=devices, variables=variables)
        for rank in range(world)
    ]
    try:
        assert [one.result() for one in peers] == ["met"] * world
        for seed, num_rows in enumerate((1, 200, 7)):
            sent = peer.as_lists(peer.make_step(num_rows, dtype, seed))
            for sender in range(1, stages):
                peers[sender + 1].order(peer.receive_message, sender)
                peers[sender].do(peer.send_message, seed, num_rows, None, sender + 1, dtype)
                assert peers[sender + 1].result() == (sent, None)
    finally:
        for one in peers:
            one.end()


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("devices", "stages", "transport"),
    [
        pytest.param("cpu", 2, "gloo", marks=pytest.mark.slow),
        pytest.param("cuda", 2, "gloo", marks=pytest.mark.gpu(2)),
        pytest.param("cuda", 2, "nccl", marks=pytest.mark.gpu(2)),
        pytest.param("cuda", 3, "nccl", marks=pytest.mark.gpu(3)),
    ],
)
def test_stages_with_a_device_each_give_the_tokens_of_transformers(pair: Pair, devices: str, stages: int, transport: str) -> None:
    spec = pair.spec(stages, draft="none").replaced(device=devices)
    reference, ids = Reference(spec), load_prompter(spec).token_ids(PROMPT, False, 24)
    expected = reference.generate(ids, 24, ignore_eos=True)
    with LocalCluster(spec.replaced(transport=transport)) as cluster:
        assert cluster.scheduler is not None
        used = {rank.transport.name for rank in cluster.description().ranks if rank.rank > 0}
        assert used == {transport}
        client = Client(cluster.scheduler, cluster.check)
        for method in ("pp", "pipedec-bestfirst", "bita"):
            request = PromptRequest(PROMPT, method=method, sampling=SamplingParams(max_tokens=24, ignore_eos=True))
            assert client.ask(request).token_ids == expected
