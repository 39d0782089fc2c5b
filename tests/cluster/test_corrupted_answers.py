"""A request for which a stage computes NaN, in a real cluster: an error that names the stage, and everybody else goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_pair import Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings
from pipedec.core import PipedecError, SamplingParams
from pipedec.engine.build import resolve
from pipedec.messages import PromptRequest

pytestmark = pytest.mark.usefixtures("leaves_nothing")
EMBEDDING = "model.embed_tokens.weight"
RARE = 0  # <pad>, which is in no text


def _request(*token_ids: int) -> PromptRequest:
    return PromptRequest(token_ids, True, "pp", SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={RARE: -100.0}))


@pytest.mark.parametrize("dispatch", ["windows", "tasks"])
@pytest.mark.failure_case("S7")
def test_a_corrupted_request_fails_and_the_others_do_not(pair: Pair, tmp_path: Path, dispatch: str) -> None:
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    tensors[EMBEDDING][RARE, 0] = torch.nan
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    spec = resolve(Settings.of(target=target, draft="none", stages=2, device="cpu"))
    with LocalCluster(spec.replaced(dispatch=dispatch)) as cluster:
        client = Client(cluster.scheduler, cluster.check)
        before = client.ask(_request(5, 9, 30)).token_ids
        with pytest.raises(PipedecError, match="stage 1 computed NaN or infinity"):
            client.ask(_request(5, RARE, 30))
        assert len(before) == 6 and client.ask(_request(5, 9, 30)).token_ids == before
