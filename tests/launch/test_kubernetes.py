"""The manifests of ``launch/kubernetes``: published schemas accept them, and what their pods start answers requests."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from support.pods import PodGroup
from support.processes import wait_until
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.server.run import RunOptions
from pipedec.verify.reference import Reference

FOLDER = Path(__file__).resolve().parents[2] / "launch" / "kubernetes"
OWN_SCHEMA = json.loads(Path(__file__).with_name("leaderworkerset.json").read_text())
KUBERNETES = "1.37"
SECRETS = {"redis-password": "of-redis", "api-key": "of-clients"}
START_SECONDS = 90.0

Manifest = dict[str, Any]


def check_core(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def check(manifest: Manifest) -> None:
    """Raises an error of validation if a field is unknown, missing or wrong."""
    if manifest["kind"] != "LeaderWorkerSet":
        return check_core(manifest)
    Draft202012Validator(OWN_SCHEMA).validate(manifest)
    template = manifest["spec"]["leaderWorkerTemplate"]
    for pods in (template["leaderTemplate"], template["workerTemplate"]):
        check_core({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}, "template": pods})
    for claim in template["volumeClaimTemplates"]:
        check_core({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})


def read(text: str) -> dict[str, Manifest]:
    """Manifests by their kind."""
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def pod_specs(manifest: Manifest) -> list[Manifest]:
    template = manifest["spec"]["leaderWorkerTemplate"]
    return [template[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]


@pytest.fixture
def base() -> dict[str, Manifest]:
    files = [file for file in (FOLDER / "base").glob("*.yaml") if file.name not in ("kustomization.yaml", "references.yaml")]
    return {kind: manifest for file in files for kind, manifest in read(file.read_text()).items()}


def test_published_schemas_accept_the_manifests(base: dict[str, Manifest]) -> None:
    assert base.keys() == {"Namespace", "LeaderWorkerSet", "Service", "NetworkPolicy"}
    for manifest in base.values():
        check(manifest)


def test_a_misspelt_field_is_found(base: dict[str, Manifest]) -> None:
    leader = pod_specs(base["LeaderWorkerSet"])[0]
    for place in (base["Service"]["spec"], base["LeaderWorkerSet"]["spec"], leader, leader["containers"][0]["livenessProbe"]):
        place["nope"] = 1
        with pytest.raises(Exception, match="Additional properties are not allowed"):
            for manifest in base.values():
                check(manifest)
        del place["nope"]


def test_pods_meet_the_restricted_standard(base: dict[str, Manifest]) -> None:
    assert base["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pod_specs(base["LeaderWorkerSet"]):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        assert {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}} == {"emptyDir"}
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


def test_the_service_selects_leaders_alone(base: dict[str, Manifest]) -> None:
    template = base["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    selector = base["Service"]["spec"]["selector"].items()
    leader, worker = (template[name]["metadata"]["labels"].items() for name in ("leaderTemplate", "workerTemplate"))
    assert selector <= leader and not selector <= worker
    assert base["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= leader & worker


def test_a_leader_has_time_to_finish_its_answers(base: dict[str, Manifest]) -> None:
    leader = pod_specs(base["LeaderWorkerSet"])[0]
    (server,) = leader["containers"]
    assert [container["name"] for container in leader["initContainers"]] == ["redis", "ranks"]  # end last, in the opposite order
    assert all(container["restartPolicy"] == "Always" for container in leader["initContainers"])
    takes = server["lifecycle"]["preStop"]["sleep"]["seconds"] + RunOptions.shutdown_timeout
    assert leader["terminationGracePeriodSeconds"] >= takes + 30


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_an_overlay_gives_manifests_that_schemas_accept(overlay: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", FOLDER / "overlays" / overlay], capture_output=True, text=True, timeout=60, check=False
    )
    assert built.returncode == 0, built.stderr
    made = read(built.stdout)
    for manifest in made.values():
        check(manifest)
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "pipedec"
    settings = made["ConfigMap"]
    assert settings["data"].keys() == {"RANKS_PER_POD", "PIPELINE_FLAGS", "SERVER_FLAGS"}
    containers = [
        container
        for pod in pod_specs(made["LeaderWorkerSet"])
        for container in [*pod.get("initContainers", ()), *pod["containers"]]
    ]
    for container in containers:
        assert container["image"].rpartition(":")[0].endswith("pipedec")
        for source in container.get("envFrom", ()):
            assert source["configMapRef"]["name"] == settings["metadata"]["name"] != "pipedec"
        if container["name"] == "ranks":
            gpus = container["resources"]["limits"].get("nvidia.com/gpu", "1")
            assert gpus == settings["data"]["RANKS_PER_POD"]


@pytest.fixture
def group(base: dict[str, Manifest], pair: Pair, tmp_path: Path, state_directory: Path) -> Iterator[PodGroup]:
    flags = {"RANKS_PER_POD": "1", "PIPELINE_FLAGS": " ".join(pair.flags), "SERVER_FLAGS": "--served-model-name tiny"}
    made = PodGroup(base["LeaderWorkerSet"], flags, SECRETS, tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def client(group: PodGroup) -> Iterator[httpx2.Client]:
    """A client of the leader pod's server, once it takes requests."""
    headers = {"Authorization": f"Bearer {SECRETS['api-key']}"}
    with httpx2.Client(base_url=f"http://127.0.0.1:{group.ports[8000]}", headers=headers, timeout=120) as made, group.kept():

        def is_ready() -> bool:
            with suppress(httpx2.TransportError):
                return made.get("/ready").status_code == 200
            return False

        assert wait_until(is_ready, START_SECONDS), group.output()
        yield made


def ask(client: httpx2.Client, max_tokens: int, after: Callable[[int], None] = lambda count: None) -> list[int]:
    """The token ids of a greedy answer. ``after`` is called with the number of tokens after each part of it that has come."""
    asked = {
        "model": "tiny", "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "method": "pp",
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    token_ids: list[int] = []
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                token_ids += choice["token_ids"] or ()
                after(len(token_ids))
    return token_ids


@pytest.mark.usefixtures("leaves_nothing")
def test_what_the_pods_start_answers_as_the_target_does(
    client: httpx2.Client, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert ask(client, 24) == reference.generate(tokenizer("Hello")["input_ids"], 24, ignore_eos=True)
    assert client.get("/v1/models", headers={"Authorization": "Bearer another"}).status_code == 401


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.failure_case("M12")
@pytest.mark.parametrize("lost", [(1, "ranks"), (0, "ranks"), (0, "redis")], ids=lambda lost: f"{lost[1]}-of-pod-{lost[0]}")
def test_an_answer_goes_on_when_a_container_was_killed(
    group: PodGroup, client: httpx2.Client, reference: Reference, tokenizer: PreTrainedTokenizerBase, lost: tuple[int, str]
) -> None:
    killed: list[int] = []

    def kill(count: int) -> None:
        if not killed:
            killed.append(count)
            group.containers[lost].kill()

    answered = ask(client, 600, kill)
    assert killed[0] < 600 and group.containers[lost].num_starts >= 2, group.output()
    assert answered == reference.generate(tokenizer("Hello")["input_ids"], 600, ignore_eos=True)
    assert client.get("/health").json()["epoch"] > 0
