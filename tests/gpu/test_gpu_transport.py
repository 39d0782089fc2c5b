"""NCCL: one rank by itself, and a cluster of two stages on two GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.tiny_pair import Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import SamplingParams
from pipedec.engine.build import load_prompter
from pipedec.messages import PromptRequest
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


def test_the_backend_of_a_device_works_for_one_rank(device: str) -> None:
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    done = subprocess.run([sys.executable, "-c", SELF_TEST, backend, device], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("devices", "transport"),
    [
        pytest.param("cpu", "gloo", marks=pytest.mark.slow),
        pytest.param("cuda", "gloo", marks=pytest.mark.gpu(2)),
        pytest.param("cuda", "nccl", marks=pytest.mark.gpu(2)),
    ],
)
def test_two_stages_on_two_devices_give_the_tokens_of_transformers(pair: Pair, devices: str, transport: str) -> None:
    spec = pair.spec(2, draft="none").replaced(device=devices)
    reference, ids = Reference(spec), load_prompter(spec).token_ids(PROMPT, False, 24)
    expected = reference.generate(ids, 24, ignore_eos=True)
    with LocalCluster(spec.replaced(transport=transport)) as cluster:
        assert cluster.scheduler is not None
        client = Client(cluster.scheduler, cluster.check)
        for method in ("pp", "pipedec-bestfirst", "bita"):
            request = PromptRequest(PROMPT, method=method, sampling=SamplingParams(max_tokens=24, ignore_eos=True))
            assert client.ask(request).token_ids == expected
